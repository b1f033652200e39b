"""Float8 quantisation against float64 numpy: reference, kernels in the GPU interpreter; and what H100s run."""

import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultrascale_jax.kernels import quantize_fp8_mosaic as fp8_mosaic
from ultrascale_jax.kernels.shapes import QUANTIZE_FP8

# The function has the name of its module.
fp8 = importlib.import_module("ultrascale_jax.kernels.quantize_fp8")

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
SIZES = {"tensor": (None, None), "row": (1, None), "block": (1, 128), "tile": (128, 128)}


def parts(shape, scaling):
    """Where each scale's part lies in `[M, K]`, in the order of `[m, k]`."""
    rows, columns = (size or n for size, n in zip(SIZES[scaling], shape, strict=True))
    return [
        [(slice(i, i + rows), slice(k, k + columns)) for k in range(0, shape[1], columns)]
        for i in range(0, shape[0], rows)
    ]


def quantized(x, scaling, dtype=E4M3, power_of_2=False):
    """Values and scales part by part; each float32 step as the definition has it."""
    x = np.asarray(x, np.float32)
    values, places = np.zeros(x.shape, dtype), parts(x.shape, scaling)
    scales = np.ones((len(places), len(places[0])), np.float32)
    for i, row in enumerate(places):
        for k, part in enumerate(row):
            amax = np.abs(x[part]).max()
            if amax > 0:
                scales[i, k] = amax * np.float32(1 / LARGEST[dtype])
            if power_of_2:
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
def references(dtype, power_of_2, given):
    """What is quantised, and by scaling: the result, both orientations, and back to float32; all from one program."""

    def both(x, scaling):
        straight = fp8.quantize_fp8(x, scaling, dtype=dtype, power_of_2=power_of_2)
        pair = fp8.quantize_fp8_both(x, scaling, dtype=dtype, power_of_2=power_of_2)
        return straight, *pair, fp8.dequantize(straight, jnp.float32)

    x = data((140, 200), given)
    return x, jax.jit(lambda x: {scaling: both(x, scaling) for scaling in SIZES})(x)


@pytest.mark.parametrize("scaling", list(SIZES))
@pytest.mark.parametrize(
    ("dtype", "power_of_2", "given"),
    [(E4M3, False, jnp.bfloat16), (E5M2, True, jnp.float32)],
    ids=["e4m3", "e5m2 by powers of 2"],
)
def test_the_reference_equals_numpy_bit_by_bit_in_both_orientations(
    scaling, dtype, power_of_2, given
):
    x, results = references(dtype, power_of_2, given)
    straight, again, turned, back = results[scaling]
    want = quantized(x, scaling, dtype, power_of_2)
    same(straight, *want)
    same(again, *want)
    same(turned, *quantized(x.T, scaling, dtype, power_of_2))
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
    """Scales as they come and powers of 2: quantised, and back to float32."""
    results = [fp8.quantize_fp8(x, "block", power_of_2=power_of_2) for power_of_2 in (False, True)]
    return [(got, fp8.dequantize(got, jnp.float32)) for got in results]


def test_too_large_is_clipped_and_not_finite_stays_not_finite():
    x = np.full((2, 256), 1000, np.float32)
    got = jax.jit(lambda *a: fp8.quantize_fp8(a[0], "tensor", amax=a[1]))(x, np.float32(448))
    np.testing.assert_array_equal(np.asarray(got.values).astype(np.float32), 448)
    assert np.asarray(got.scales) == 1
    for bad in (np.nan, np.inf, -np.inf):
        x[1, 200] = bad
        for _, back in by_blocks(x):
            back = np.asarray(back)
            assert not np.isfinite(back[1, 128:]).any()
            assert np.isfinite(back[0]).all() and np.isfinite(back[1, :128]).all()


def test_parts_of_the_smallest_numbers_have_scale_1():
    x = np.full((2, 256), 1e-37, np.float32)
    x[:, 128:] = 0
    _, (got, _) = by_blocks(x)
    np.testing.assert_array_equal(got.scales, 1)
    np.testing.assert_array_equal(np.asarray(got.values).astype(np.float32), 0)


def made(kind, dtype=jnp.bfloat16, shape=(5, 1024)):
    """Arguments, float64 result, and the function that quantises it, for a norm or SwiGLU."""
    if kind == "rms_norm":
        x, wide = data(shape, dtype), np.asarray(data(shape, dtype), np.float64)
        weight = (1 + 0.3 * np.random.default_rng(7).normal(size=shape[1:])).astype(np.float32)
        y = wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + 1e-3) * weight
        return (x, weight), y, lambda *a, **k: fp8.rms_norm_quantize(*a, 1e-3, **k)
    gate, up = data(shape, dtype), data(shape, dtype, seed=1)
    wide, other = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    return (gate, up), wide * (1 + np.tanh(wide / 2)) / 2 * other, fp8.swiglu_quantize


@pytest.mark.parametrize("kind", ["rms_norm", "swiglu"])
@pytest.mark.parametrize("scaling", ["row", "block"])
def test_a_norm_and_swiglu_are_quantised_as_their_results_would_be(kind, scaling):
    arguments, y, quantise = made(kind, jnp.float32)
    got = jax.jit(lambda *a: quantise(*a, scaling=scaling))(*arguments)
    values, scales = quantized(y, scaling)
    np.testing.assert_allclose(got.scales, scales, rtol=1e-5)
    # What lies between two float8 numbers may fall to either side.
    assert np.mean(np.asarray(got.values) == values) > 0.999


def test_unknown_choices_fail_and_say_what_is_known(h100s):
    x = np.ones((128, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match="scaling='column': must be"):
        fp8.quantize_fp8(x, "column")
    with pytest.raises(ValueError, match="float8_e4m3fn or float8_e5m2"):
        fp8.quantize_fp8(x, "row", dtype=jnp.int8)
    with pytest.raises(ValueError, match="only 'tensor' takes it"):
        fp8.quantize_fp8(x, "row", amax=np.float32(1))
    with pytest.raises(ValueError, match=r"implementation='mosaic'.*got cpu"):
        fp8.quantize_fp8(x, "row", implementation="mosaic")
    wrongs = x[:100], x.astype(np.float32), x[None]
    with jax.sharding.use_abstract_mesh(h100s.abstract_mesh):
        for wrong in wrongs:
            with pytest.raises(ValueError, match=r"multiples of 128.*got NVIDIA H100"):
                fp8.quantize_fp8_both(wrong, "block", implementation="mosaic")
        for scaling in ("block", "tensor"):
            with pytest.raises(ValueError, match=r"multiples of 128.*got NVIDIA H100"):
                fp8.swiglu_quantize(x, x, scaling, implementation="mosaic")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "power_of_2", "scaling"),
    [
        *(pytest.param(E4M3, False, scaling, id=f"e4m3-{scaling}") for scaling in SIZES),
        # The other type rounds in the same place whatever its scale is for.
        *(
            pytest.param(
                E5M2,
                True,
                scaling,
                id=f"e5m2 by powers of 2-{scaling}",
                marks=() if scaling == "tile" else pytest.mark.wide,
            )
            for scaling in SIZES
        ),
    ],
)
def test_the_kernels_in_the_interpreter_equal_numpy_bit_by_bit(
    interpreted, scaling, dtype, power_of_2
):
    # Each warpgroup has more tiles and rows than are loaded ahead; not all have the same number of rows.
    x, settings = data(QUANTIZE_FP8["tiny"]), (scaling, None, dtype, power_of_2)
    first = x[: 45 if scaling == "row" else 128]

    def run(x, first):
        both = fp8.kernel(x, *settings, both=True, programs=1)
        return *both, *fp8.kernel(first, *settings, both=False, programs=1)

    straight, turned, alone = interpreted(run, x, first)
    want = quantized(x, scaling, dtype, power_of_2)
    same(straight, *want)
    same(turned, *quantized(x.T, scaling, dtype, power_of_2))
    same(alone, *quantized(first, scaling, dtype, power_of_2))


# No run takes these kernels.
@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rms_norm", "swiglu"])
@pytest.mark.parametrize(
    ("scaling", "K"),
    # More columns than are loaded at once are a matter of rows, which are summed over all of them.
    [("row", 4096), pytest.param("block", 4096, marks=pytest.mark.wide), ("block", 512)],
)
def test_kernels_that_quantise_what_they_make_equal_the_reference(interpreted, kind, scaling, K):
    arguments, _, quantise = made(kind, shape=(11, K))
    count = 1 if kind == "rms_norm" else 2
    combine = fp8_mosaic.normed(1e-3) if kind == "rms_norm" else fp8_mosaic.gated
    scale = functools.partial(fp8.scale_of, dtype=E4M3, power_of_2=False)

    def run(*arrays):
        return fp8_mosaic.by_rows(
            arrays[:count],
            scale,
            E4M3,
            blocks=scaling == "block",
            combine=combine,
            vectors=arrays[count:],
            programs=1,
        ), quantise(*arrays, scaling=scaling)

    (values, scales), want = interpreted(run, *arguments)
    # A last bit of a float32 sum rounds a bfloat16 the other way at times.
    np.testing.assert_allclose(scales, want.scales, rtol=2.0**-7)
    assert np.mean(np.asarray(values) == np.asarray(want.values)) > 0.99


# Implied by attention's kernel, the largest.
@pytest.mark.wide
@pytest.mark.slow
def test_h100s_run_one_kernel_that_keeps_all_in_registers(compiled, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    M, K = shape = QUANTIZE_FP8["llama3_8b"]
    settings = {"power_of_2": True, "implementation": "mosaic"}
    both = functools.partial(fp8.quantize_fp8_both, **settings)
    one = functools.partial(fp8.quantize_fp8, **settings)
    norm = functools.partial(fp8.rms_norm_quantize, **settings)
    wide = M, 14336
    programs = [
        compiled(lambda x: both(x, "block"), shape),
        compiled(lambda x: one(x, "tile"), shape),
        compiled(lambda x: one(x, "row"), shape),
        compiled(lambda x: tuple(q.values for q in both(x, "row")), shape),
        compiled(lambda x, w: norm(x, w, 1e-5, "block"), shape, (K,)),
        compiled(lambda x, y: fp8.swiglu_quantize(x, y, "row", **settings), wide, wide),
    ]
    for program in programs:
        text = program.as_text()
        assert len(re.findall("custom_call_target=.mosaic", text)) == 1
        assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", text)
        # Scales and their inverses at most.
        assert program.memory_analysis().temp_size_in_bytes < M * K / 16
    words = "".join(capfd.readouterr())
    no_spills = words.count("0 bytes spill stores, 0 bytes spill loads")
    assert no_spills == words.count("spill stores") == len(programs)
