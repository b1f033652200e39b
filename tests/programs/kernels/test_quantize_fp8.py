"""Float8 quantisation against float64 numpy: reference, kernels in the GPU interpreter; and what H100s run."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# The function has the name of its module.
fp8 = importlib.import_module("ultrascale_jax.kernels.quantize_fp8")

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
SIZES = {"tensor": (None, None), "row": (1, None), "block": (1, 128), "tile": (128, 128)}
BY_KERNEL = ("block", "tile")


def parts(shape, scaling):
    """Place of each scale's part in `[M, K]`, in the order of `[m, k]`."""
    rows, columns = (size or n for size, n in zip(SIZES[scaling], shape, strict=True))
    return [
        [(slice(i, i + rows), slice(k, k + columns)) for k in range(0, shape[1], columns)]
        for i in range(0, shape[0], rows)
    ]


def quantized(x, scaling, dtype=E4M3):
    """Values and scales part by part; each float32 step as the definition has it."""
    x = np.asarray(x, np.float32)
    values, places = np.zeros(x.shape, dtype), parts(x.shape, scaling)
    scales = np.ones((len(places), len(places[0])), np.float32)
    for i, row in enumerate(places):
        for k, part in enumerate(row):
            amax = np.abs(x[part]).max()
            if amax > 0:
                scales[i, k] = amax * np.float32(1 / LARGEST[dtype])
            scales[i, k] = 2.0 ** np.ceil(np.log2(np.float64(scales[i, k])))
            scaled = x[part] * (np.float32(1) / scales[i, k])
            values[part] = np.clip(scaled, -LARGEST[dtype], LARGEST[dtype]).astype(dtype)
    return values, scales[0, 0] if scaling == "tensor" else scales


def data(shape, dtype=jnp.bfloat16, seed=0):
    """Magnitudes over many powers of 2, zeros among them, a part of zeros alone."""
    sizes, x = np.random.default_rng(seed).normal(size=(2, *shape))
    x *= np.exp(2 * sizes)
    x[0] = x[:, 3] = 0
    return x.astype(dtype)


def same(got: fp8.Quantized, values, scales) -> None:
    assert got.scales.dtype == jnp.float32 and got.values.dtype == values.dtype
    np.testing.assert_array_equal(np.asarray(got.scales), scales)
    np.testing.assert_array_equal(np.asarray(got.values).view(np.uint8), values.view(np.uint8))


@functools.cache
def references(dtype, given):
    """Return the input and, by scaling, the result in both orientations and back in float32, from one program."""

    def both(x, scaling):
        straight = fp8.quantize_fp8(x, scaling, dtype=dtype)
        pair = fp8.quantize_fp8_both(x, scaling, dtype=dtype)
        return straight, *pair, fp8.dequantize(straight, jnp.float32)

    x = data((140, 200), given)
    return x, jax.jit(lambda x: {scaling: both(x, scaling) for scaling in SIZES})(x)


@pytest.mark.parametrize("scaling", list(SIZES))
@pytest.mark.parametrize(
    ("dtype", "given"), [(E4M3, jnp.bfloat16), (E5M2, jnp.float32)], ids=["e4m3", "e5m2"]
)
def test_the_reference_equals_numpy_bit_by_bit_in_both_orientations(scaling, dtype, given):
    x, results = references(dtype, given)
    straight, again, turned, back = results[scaling]
    want = quantized(x, scaling, dtype)
    same(straight, *want)
    same(again, *want)
    same(turned, *quantized(x.T, scaling, dtype))
    x = np.asarray(x, np.float64)
    step, least = (2.0**-4, 2.0**-10) if dtype == E4M3 else (2.0**-3, 2.0**-17)
    places = parts(x.shape, scaling)
    for i, row in enumerate(places):
        for k, part in enumerate(row):
            scale = want[1] if scaling == "tensor" else want[1][i, k]
            bound = np.maximum(np.abs(x[part]) * step, scale * least) * (1 + 1e-6)
            assert np.all(np.abs(np.asarray(back)[part] - x[part]) <= bound)


@functools.cache
def batches():
    """Two, and by scaling: quantised, back to float32, and back to float32 one by one; all from one program."""

    def run(x, scaling):
        got = fp8.quantize_fp8(x, scaling)
        alone = [fp8.Quantized(*(a[i] for a in got)) for i in (0, 1) if got.scales.ndim]
        return got, *(fp8.dequantize(q, jnp.float32) for q in (got, *alone))

    x = data((2, 130, 136))
    return x, jax.jit(lambda x: {scaling: run(x, scaling) for scaling in SIZES})(x)


@pytest.mark.parametrize("scaling", ["row", "block", "tile"])
def test_leading_dims_are_batches(scaling):
    x, results = batches()
    got, back, *alone = results[scaling]
    for i in range(2):
        same(fp8.Quantized(*(np.asarray(a)[i] for a in got)), *quantized(x[i], scaling))
        np.testing.assert_array_equal(np.asarray(back)[i], alone[i])


def test_leading_dims_share_the_scale_of_a_tensor():
    x, results = batches()
    values, scale = quantized(x.reshape(260, 136), "tensor")
    same(results["tensor"][0], values.reshape(x.shape), scale)


@jax.jit
def by_blocks(x):
    """Quantised, and back to float32."""
    got = fp8.quantize_fp8(x, "block")
    return got, fp8.dequantize(got, jnp.float32)


def test_too_large_is_clipped_and_not_finite_stays_not_finite():
    x = np.full((2, 256), 1000, np.float32)
    got = jax.jit(lambda *a: fp8.quantize_fp8(a[0], "tensor", amax=a[1]))(x, np.float32(448))
    np.testing.assert_array_equal(np.asarray(got.values).astype(np.float32), 448)
    assert np.asarray(got.scales) == 1
    for bad in (np.nan, np.inf, -np.inf):
        x[1, 200] = bad
        back = np.asarray(by_blocks(x)[1])
        assert not np.isfinite(back[1, 128:]).any()
        assert np.isfinite(back[0]).all() and np.isfinite(back[1, :128]).all()


def test_parts_of_the_smallest_numbers_have_scale_1():
    x = np.full((2, 256), 1e-37, np.float32)
    x[:, 128:] = 0
    got, _ = by_blocks(x)
    np.testing.assert_array_equal(got.scales, 1)
    np.testing.assert_array_equal(np.asarray(got.values).astype(np.float32), 0)


@pytest.mark.parametrize(
    ("dtype", "scaling"),
    [
        *(pytest.param(E4M3, scaling, id=f"e4m3-{scaling}") for scaling in BY_KERNEL),
        # The other type rounds in the same place whatever its scale is for.
        pytest.param(E5M2, "tile", id="e5m2-tile"),
    ],
)
def test_the_kernels_in_the_interpreter_equal_numpy_bit_by_bit(interpreted, scaling, dtype):
    # Each warpgroup has more tiles than are loaded ahead.
    x, settings = data((384, 256)), (scaling, dtype)
    first = x[:128]

    def run(x, first):
        both = fp8.kernel(x, *settings, both=True)
        return *both, *fp8.kernel(first, *settings, both=False)

    straight, turned, alone = interpreted(run, x, first, cores=1)
    want = quantized(x, scaling, dtype)
    same(straight, *want)
    same(turned, *quantized(x.T, scaling, dtype))
    same(alone, *quantized(first, scaling, dtype))
