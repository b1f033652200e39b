"""Grouped products against a loop over experts: reference, kernel in the GPU interpreter; and what H100s run."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ultrascale_jax.hlo.deviceless import DEVICELESS_OPTIONS, uncached
from ultrascale_jax.kernels import grouped_matmul_mosaic as mosaic
from ultrascale_jax.kernels.grouped_matmul import grouped_matmul
from ultrascale_jax.plan.compiled.compile import target_devices
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


def with_gradients(implementation, bound=1.5):
    def run(x, w, sizes, dy):
        y, pull_back = jax.vjp(
            lambda x, w: grouped_matmul(
                x, w, sizes, capacity_factor=bound, implementation=implementation
            ),
            x,
            w,
        )
        return y, *pull_back(dy)

    return run


ROWS, EXPERTS = 64, 4
# Above the bound times the mean an expert takes further turns; above 4 times the mean none has any.
references = {bound: jax.jit(with_gradients("xla", bound)) for bound in (0.5, 1.0, 4.0)}


@given(
    st.lists(st.integers(0, ROWS), min_size=EXPERTS, max_size=EXPERTS),
    st.sampled_from(list(references)),
)
@example([0, 0, 0, 0], 1.0)
@example([64, 64, 64, 64], 1.0)
@example([0, 0, 0, 64], 0.5)
@example([16, 32, 48, 64], 1.0)
@settings(deadline=None, max_examples=60, derandomize=True)
@pytest.mark.slow
def test_the_reference_equals_a_loop_over_experts_for_any_sizes_and_bounds(ends, bound):
    sizes = np.diff(np.sort(ends), prepend=0).astype(np.int32)
    x, w, dy = arrays(ROWS, EXPERTS, 6, 5)
    wanted = looped(x, w, sizes, dy)
    for got, want in zip(references[bound](x, w, sizes, dy), wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * max(1, np.abs(want).max()), rtol=0)


@pytest.mark.parametrize("axis", [0, 1])
def test_transposes_and_matrices_with_the_experts_second_are_the_same_products(axis):
    x, w, dy = arrays(ROWS, EXPERTS, 6, 5)
    sizes = np.array([20, 0, 13, 31], np.int32)
    dx, y, dw = looped(dy, w.swapaxes(1, 2), sizes, x)
    run = functools.partial(grouped_matmul, sizes=sizes, transposed=True, axis=axis)
    found, pull_back = jax.vjp(run, dy, np.moveaxis(w, 0, axis))
    found_y, found_dw = pull_back(x)
    wanted = dx, y, dw.swapaxes(1, 2)
    for got, want in zip((found, found_y, jnp.moveaxis(found_dw, axis, 0)), wanted, strict=True):
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
                lambda *a: grouped_matmul(*a, capacity_factor=1.0),
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


def test_forced_mosaic_fails_loudly_where_it_cannot_run(h100s):
    x, w, _ = arrays(8, 1, 128, 128, jnp.bfloat16)
    sizes = np.array([8], np.int32)
    with pytest.raises(ValueError, match=r"kernels\.grouped_matmul='mosaic'.*got cpu"):
        grouped_matmul(x, w, sizes, implementation="mosaic")
    wrong = (x[:7], w), (x, w[..., :64]), (x.astype(np.float32), w)
    with jax.sharding.use_abstract_mesh(h100s.abstract_mesh):
        assert jax.eval_shape(with_gradients("mosaic"), x, w, sizes, x)[0].shape == (8, 128)
        for arguments in wrong:
            with pytest.raises(
                ValueError, match=r"kernels\.grouped_matmul='mosaic'.*got NVIDIA H100"
            ):
                grouped_matmul(*arguments, sizes, implementation="mosaic")
    with pytest.raises(ValueError, match="must be auto, mosaic or xla"):
        grouped_matmul(x, w, sizes, implementation="triton")


row_tiles = jax.jit(mosaic._row_tiles, static_argnums=1)


@given(st.lists(st.integers(0, 1000), min_size=5, max_size=5))
@example([0, 0, 0, 0, 0])
@example([7, 129, 135, 263, 1000])
@example([128, 256, 384, 512, 640])
@settings(deadline=None, max_examples=100, derandomize=True)
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
KERNEL_SHAPES = [(352, 4, 384, 256), (336, 4, 128, 128)]


def relative(got, want) -> float:
    difference = np.asarray(got, np.float64) - want
    return float(np.linalg.norm(difference) / np.linalg.norm(want))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "axis"),
    [(KERNEL_SHAPES[0], 1), pytest.param(KERNEL_SHAPES[1], 0, marks=pytest.mark.wide)],
    ids=str,
)
def test_the_kernel_in_the_interpreter_equals_a_loop_and_has_no_races(interpreted, shape, axis):
    x, w, dy = arrays(*shape, jnp.bfloat16)
    y, dx, dw = looped(x, w, KERNEL_SIZES, dy)
    rest = KERNEL_SIZES.sum()
    # Memory that nothing has written reads as NaN there, and so do these rows.
    unused = x.copy()
    unused[rest:] = np.nan

    def run(x, w, sizes, dy):
        w = jnp.moveaxis(w, 0, axis)
        dw = mosaic.weight_gradient(x, dy, sizes, axis=axis, programs=3)
        return (
            mosaic.products(x, w, sizes, axis=axis, programs=3),
            mosaic.products(dy, w, sizes, transposed=True, axis=axis, programs=3),
            jnp.moveaxis(dw, axis, 0),
        )

    results = [np.asarray(a) for a in interpreted(run, unused, w, KERNEL_SIZES, dy)]
    for got, want in zip(results, (y, dx, dw), strict=True):
        assert got.dtype == jnp.bfloat16
        assert relative(got, want) < 4e-3
    for got, unwritten in zip(results, (slice(rest, None), slice(rest, None), 1), strict=True):
        np.testing.assert_array_equal(got[unwritten].astype(np.float32), 0)


@pytest.fixture(scope="module")
def h100s() -> jax.sharding.Mesh:
    devices = np.array(target_devices(8))
    return jax.sharding.Mesh(devices, ("ep",), axis_types=(AxisType.Explicit,))


def compiled(mesh, implementation: str, R: int, E: int, D: int, F: int):
    """Result and gradients on each of the devices, its own rows and experts."""
    split, n = P("ep"), mesh.size
    with jax.set_mesh(mesh), uncached():
        run = smap(
            with_gradients(implementation),
            in_specs=(split,) * 4,
            out_specs=(split,) * 3,
            axes=("ep",),
        )
        shapes = [(n * R, D), (n * E, D, F), (n * E,), (n * R, F)]
        types = [jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.bfloat16]
        given = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, split))
            for shape, dtype in zip(shapes, types, strict=True)
        ]
        options = {"xla_gpu_enable_triton_gemm": False, **DEVICELESS_OPTIONS}
        return jax.jit(run).lower(*given).compile(compiler_options=options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        (65536, 16, 2048, 768),
        pytest.param((4096, 4, 384, 640), marks=pytest.mark.wide),
    ],
    ids=["qwen3_30b_a3b", "narrow"],
)
def test_h100s_run_three_kernels_that_keep_all_in_registers(h100s, shape, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    program = compiled(h100s, "mosaic", *shape)
    text, (R, E, D, F) = program.as_text(), shape
    calls = [line for line in text.splitlines() if re.search("custom_call_target=.mosaic", line)]
    results = [re.search(r"= bf16\[([\d,]+)\]", line)[1] for line in calls]
    assert sorted(results) == sorted([f"{R},{F}", f"{R},{D}", f"{E},{D},{F}"])
    assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", text)
    # Nothing but the lists of tiles.
    assert program.memory_analysis().temp_size_in_bytes < 1e6
    words = "".join(capfd.readouterr())
    assert (
        words.count("0 bytes spill stores, 0 bytes spill loads") == words.count("spill stores") == 3
    )
    assert "setmaxnreg" not in words


def test_on_h100s_the_reference_is_batched_products_of_padded_groups(h100s):
    R, E, D, F = 65536, 16, 2048, 768
    program = compiled(h100s, "xla", R, E, D, F)
    text = program.as_text()
    sizes = [
        np.prod([int(n) for n in shape.split(",")])
        for shape in re.findall(r"(?:bf16|f32|pred|s32)\[([\d,]+)\]", text)
    ]
    assert max(sizes) <= 1.5 * R * D
    # Three products, each once and once more in the loop over further turns.
    assert text.count('custom_call_target="__cublas') == 6
    assert len(re.findall(r" while\(", text)) == 3
