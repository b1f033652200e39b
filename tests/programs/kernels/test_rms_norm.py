"""RMSNorm against float64 numpy: reference, kernel in the GPU interpreter; and what H100s run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.gpu_kernels import compile_for, relative
from ultrascale_jax.kernels import rms_norm_mosaic as mosaic
from ultrascale_jax.kernels.device import match_vma
from ultrascale_jax.kernels.rms_norm import rms_norm
from ultrascale_jax.sharding.manual import smap

EPS = 1e-3
"""Large enough to be seen in the results."""


def in_float64(x, weight, dy):
    """The norm of the rows, and gradients of x and weight."""
    x, weight, dy = (np.asarray(a, np.float64) for a in (x, weight, dy))
    scale = 1 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS)
    dxn = dy * weight
    dx = scale * (dxn - x * scale**2 * np.mean(dxn * x, axis=-1, keepdims=True))
    dw = np.sum(dy * x * scale, axis=tuple(range(x.ndim - 1)))
    return x * scale * weight, dx, dw


def arrays(shape, dtype=np.float32):
    """x, weight and dy."""
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=shape).astype(dtype) for _ in range(2))
    weight = (1 + 0.3 * rng.normal(size=shape[-1:])).astype(np.float32)
    return x, weight, dy


def norm_with_gradients(implementation):
    def run(x, weight, dy):
        y, pull_back = jax.vjp(
            lambda *a: rms_norm(*a, eps=EPS, implementation=implementation), x, weight
        )
        return y, *pull_back(dy)

    return run


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=str)
def test_the_reference_equals_float64_with_its_gradients(dtype):
    given = arrays((3, 5, 48), dtype)
    bound = 1e-6 if dtype == np.float32 else 4e-3
    results = jax.jit(norm_with_gradients("auto"))(*given)
    for got, want in zip(results, in_float64(*given), strict=True):
        assert relative(got, want) < bound
    assert [a.dtype for a in results] == [dtype, dtype, np.float32]


def test_gradients_of_a_weight_that_devices_share_add_up():
    mesh = jax.make_mesh((4,), ("dp",), (AxisType.Explicit,), devices=jax.devices()[:4])
    x, weight, dy = arrays((8, 32))
    with jax.set_mesh(mesh):
        split = P("dp")

        def run(x, weight, dy):
            norm = smap(
                lambda *a: rms_norm(*a, eps=EPS),
                in_specs=(split, P()),
                out_specs=split,
                axes=("dp",),
            )
            y, pull_back = jax.vjp(norm, x, weight)
            return y, *pull_back(dy)

        placed = [jax.device_put(a, s) for a, s in ((x, split), (weight, P()), (dy, split))]
        results = jax.jit(run)(*placed)
    for got, want in zip(results, in_float64(x, weight, dy), strict=True):
        assert relative(got, want) < 1e-6


# Warpgroups have more rows than are loaded ahead, or none; the second D is cut into the narrowest chunks.
@pytest.mark.parametrize(
    ("shape", "cores"),
    [((11, 384), 1), ((3, 384), 2)],
    ids=["long", "short"],
)
def test_the_kernel_in_the_interpreter_equals_float64_and_has_no_races(interpreted, shape, cores):
    given = arrays(shape, jnp.bfloat16)

    def run(x, weight, dy):
        return mosaic.backward(x, weight, dy, EPS)

    dx, dw = interpreted(run, *given, cores=cores)
    _, want_dx, want_dw = in_float64(*given)
    assert relative(dx, want_dx) < 4e-3
    assert relative(dw, want_dw) < 1e-6
    assert dx.dtype == jnp.bfloat16


def test_h100s_run_a_kernel_backwards_that_keeps_all_in_registers(h100s, in_registers):
    rows, D = 8 * 8192, 4096
    arrays = ((rows, D), jnp.bfloat16), ((D,), jnp.float32), ((rows, D), jnp.bfloat16)
    split = P("dp")

    def run(*arrays):
        # Varying already, so that the weight's gradient stays what this device has of it.
        return norm_with_gradients("mosaic")(*match_vma(*arrays))

    program = compile_for(h100s, run, arrays, (split, P(), split), split)
    assert len(in_registers(program)) == 1
    # The partial sums of the weight's gradient, a row of float32 for each of an SM's warpgroups, which hold 16,384.
    assert program.memory_analysis().temp_size_in_bytes < 144 * 16384 * 4
