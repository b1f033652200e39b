"""Grouped products against a loop over experts: reference, kernel in the GPU interpreter; and what H100s run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.gpu_kernels import compile_for, relative
from ultrascale_jax.kernels import grouped_matmul_mosaic as mosaic
from ultrascale_jax.kernels.grouped_matmul import grouped_matmul
from ultrascale_jax.sharding.manual import smap


def looped(x, w, sizes, dy) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Result and gradients of x and w, one expert after the other in float64."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    ends = np.cumsum(sizes)
    for e, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        y[start:end] = x[start:end] @ w[e]
        dx[start:end] = dy[start:end] @ w[e].T
        dw[e] = x[start:end].T @ dy[start:end]
    return y, dx, dw


def arrays(R, E, D, F, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for shape in ((R, D), (E, D, F), (R, F))]


def with_gradients(implementation):
    """`(x, w, sizes, dy)` to the result and the gradients of x and w, `[D, E, F]`."""

    def run(x, w, sizes, dy):
        multiply = functools.partial(grouped_matmul, sizes=sizes, implementation=implementation)
        y, pull_back = jax.vjp(multiply, x, w)
        return y, *pull_back(dy)

    return run


def experts_second(w):
    """From `[E, D, F]` to `[D, E, F]`, and back."""
    return np.moveaxis(w, 0, 1)


ROWS, EXPERTS = 64, 4
reference = jax.jit(with_gradients("xla"))


@given(st.lists(st.integers(0, ROWS), min_size=EXPERTS, max_size=EXPERTS))
@example([0, 0, 0, 0])
@example([64, 64, 64, 64])
@example([0, 0, 0, 64])
@example([16, 32, 48, 64])
@settings(max_examples=8)
def test_the_reference_equals_a_loop_over_experts_for_any_sizes(ends):
    sizes = np.diff(np.sort(ends), prepend=0).astype(np.int32)
    x, w, dy = arrays(ROWS, EXPERTS, 6, 5)
    y, dx, dw = looped(x, w, sizes, dy)
    results = reference(x, experts_second(w), sizes, dy)
    for got, want in zip(results, (y, dx, experts_second(dw)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * max(1, np.abs(want).max()), rtol=0)


def test_transposed_matrices_are_the_same_products():
    x, w, dy = arrays(ROWS, EXPERTS, 6, 5)
    sizes = np.array([20, 0, 13, 31], np.int32)
    dx, y, dw = looped(dy, w.swapaxes(1, 2), sizes, x)
    run = functools.partial(grouped_matmul, sizes=sizes, transposed=True)
    found, pull_back = jax.vjp(run, dy, experts_second(w))
    found_y, found_dw = pull_back(x)
    wanted = dx, y, experts_second(dw.swapaxes(1, 2))
    for got, want in zip((found, found_y, found_dw), wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize("shared", [True, False], ids=["same experts", "own experts"])
def test_each_device_multiplies_its_own_rows_and_gradients_of_shared_experts_add_up(shared):
    mesh = jax.make_mesh((4,), ("ep",), (AxisType.Explicit,), devices=jax.devices()[:4])
    sizes = np.array([[5, 0, 30, 2], [0, 0, 40, 0], [10] * 4, [0] * 4], np.int32)
    (x, _, dy), (_, w, _) = arrays(4 * 40, 1, 6, 5), arrays(1, 4 if shared else 16, 6, 5)
    experts = P() if shared else P("ep")
    with jax.set_mesh(mesh):
        split = P("ep")
        specs = split, experts, split

        def run(x, w, sizes, dy):
            multiply = smap(
                lambda x, w, sizes: grouped_matmul(x, jnp.moveaxis(w, 0, 1), sizes),
                in_specs=specs,
                out_specs=split,
                axes=("ep",),
            )
            y, pull_back = jax.vjp(lambda x, w: multiply(x, w, sizes), x, w)
            return y, *pull_back(dy)

        given = (x, w, sizes.reshape(-1), dy)
        placed = [jax.device_put(a, s) for a, s in zip(given, (*specs, split), strict=True)]
        results = jax.jit(run)(*placed)
    own = [w if shared else w[4 * i : 4 * i + 4] for i in range(4)]
    parts = [
        looped(x[40 * i : 40 * i + 40], own[i], sizes[i], dy[40 * i : 40 * i + 40])
        for i in range(4)
    ]
    y, dx, dw = zip(*parts, strict=True)
    wanted = np.concatenate(y), np.concatenate(dx), sum(dw) if shared else np.concatenate(dw)
    for got, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)


row_tiles = jax.jit(mosaic._row_tiles, static_argnums=1)


@given(st.lists(st.integers(0, 1000), min_size=5, max_size=5))
@example([0, 0, 0, 0, 0])
@example([7, 129, 135, 263, 1000])
@example([128, 256, 384, 512, 640])
@settings(max_examples=8)
def test_every_row_is_in_one_tile_which_starts_where_a_copy_may(ends):
    ends = np.sort(ends)
    plan, count = row_tiles(np.diff(ends, prepend=0).astype(np.int32), 1000)
    (count,) = np.asarray(count)
    assert count <= plan.shape[1]
    owner = np.full(1000, -1)
    for expert, start, first, rows in np.asarray(plan)[:, :count].T:
        assert start % mosaic.ALIGNED == 0 and 0 < rows and 0 <= first <= mosaic.ROWS - rows
        own = owner[start + first : start + first + rows]
        assert len(own) == rows and np.all(own == -1)
        own[:] = expert
    np.testing.assert_array_equal(owner, np.searchsorted(ends, np.arange(1000), side="right"))


# Empty groups, groups inside one tile, over several, and more steps than are loaded ahead; rows after the last group.
KERNEL_SIZES = np.array([7, 0, 290, 33], np.int32)


def test_the_kernel_in_the_interpreter_equals_a_loop_and_has_no_races(interpreted):
    x, w, dy = arrays(352, 4, 384, 256, jnp.bfloat16)
    y, dx, dw = looped(x, w, KERNEL_SIZES, dy)
    rest = KERNEL_SIZES.sum()
    # Memory that nothing has written reads as NaN there, and so do these rows.
    unused = x.copy()
    unused[rest:] = np.nan

    def run(x, w, sizes, dy):
        return (
            mosaic.products(x, w, sizes),
            mosaic.products(dy, w, sizes, transposed=True),
            mosaic.weight_gradient(x, dy, sizes),
        )

    given = unused, experts_second(w), KERNEL_SIZES, dy
    results = [np.asarray(a) for a in interpreted(run, *given, cores=3)]
    for got, want in zip(results, (y, dx, experts_second(dw)), strict=True):
        assert got.dtype == jnp.bfloat16
        assert relative(got, want) < 4e-3
    for zeros in (results[0][rest:], results[1][rest:], results[2][:, 1]):
        np.testing.assert_array_equal(zeros.astype(np.float32), 0)


def test_h100s_run_three_kernels_that_keep_all_in_registers(h100s, in_registers):
    """Each device has its own rows and experts."""
    R, E, D, F = 65536, 16, 2048, 768  # Qwen3-30B-A3B
    split, experts, n = P("dp"), P(None, "dp"), h100s.size
    shapes = (n * R, D), (D, n * E, F), (n * E,), (n * R, F)
    types = jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.bfloat16
    program = compile_for(
        h100s,
        with_gradients("mosaic"),
        list(zip(shapes, types, strict=True)),
        (split, experts, split, split),
        (split, split, experts),
    )
    wanted = [f"bf16[{R},{F}]", f"bf16[{R},{D}]", f"bf16[{D},{E},{F}]"]
    assert sorted(in_registers(program)) == sorted(wanted)
    # Nothing but the lists of tiles.
    assert program.memory_analysis().temp_size_in_bytes < 1e6
