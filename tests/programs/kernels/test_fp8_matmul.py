"""Block-scaled fp8 products against float64: reference, kernel in the GPU interpreter; and what H100s run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.gpu_kernels import compile_for, relative
from ultrascale_jax.kernels import fp8_matmul_mosaic as mosaic
from ultrascale_jax.kernels.fp8_matmul import fp8_matmul
from ultrascale_jax.kernels.quantize_fp8 import Quantized

E4M3 = jnp.float8_e4m3fn


def operands(M, N, K, b_scaling, groups=(), a_type=E4M3) -> tuple[Quantized, Quantized]:
    """Two quantised arrays whose blocks differ in size, so that a scale in the wrong place shows."""
    rng = np.random.default_rng(0)

    def quantised(rows, height, dtype=E4M3):
        values = rng.normal(scale=100, size=(*groups, rows, K)).clip(-448, 448).astype(dtype)
        scales = rng.uniform(0.1, 10, (*groups, -(-rows // height), -(-K // 128))) / 448
        return Quantized(values, scales.astype(np.float32))

    return quantised(M, 1, a_type), quantised(N, 128 if b_scaling == "tile" else 1)


def exact(a: Quantized, b: Quantized) -> np.ndarray:
    """The product in float64."""
    wide = []
    for values, scales in (a, b):
        (M, K), rows = values.shape[-2:], scales.shape[-2]
        spread = scales.astype(np.float64).repeat(128, -1).repeat(1 if rows == M else 128, -2)
        wide.append(values.astype(np.float64) * spread[..., :M, :K])
    return wide[0] @ np.swapaxes(wide[1], -1, -2)


@pytest.mark.parametrize("b_scaling", ["tile", "block"])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((24, 160, 300), ()), ((5, 3, 128), (3,)), ((130, 1, 20), ())],
    ids=["short blocks", "groups", "one row"],
)
def test_the_reference_multiplies_what_values_and_scales_say(shape, groups, b_scaling):
    a, b = operands(*shape, b_scaling, groups)
    want = exact(a, b)
    got, rounded = jax.jit(lambda *ab: (fp8_matmul(*ab, out_dtype=jnp.float32), fp8_matmul(*ab)))(
        a, b
    )
    assert got.dtype == jnp.float32 and got.shape == want.shape
    assert relative(got, want) < 1e-6
    assert relative(rounded, want) < 4e-3


@pytest.mark.parametrize(
    ("shape", "groups", "a_type", "b_scaling", "dtype", "cores"),
    [
        # Two waves; a program without a tile.
        pytest.param((256, 128, 384), 1, E4M3, "tile", jnp.bfloat16, 2, id="forward"),
        # One wave; more steps than are loaded ahead.
        pytest.param(
            (128, 128, 640),
            2,
            jnp.float8_e5m2,
            "block",
            jnp.float32,
            1,
            id="weight gradient of groups",
        ),
        # The next tile's blocks are loaded before the end of this one; programs of two tiles, one and none.
        pytest.param((128, 384, 1024), 1, E4M3, "tile", jnp.bfloat16, 2, id="chain"),
    ],
)
def test_the_kernel_in_the_interpreter_equals_the_reference_and_has_no_races(
    interpreted, shape, groups, a_type, b_scaling, dtype, cores
):
    a, b = operands(*shape, b_scaling, (groups,), a_type)
    got = interpreted(lambda a, b: mosaic.products(*a, *b, dtype), a, b, cores=cores)
    assert got.dtype == dtype
    assert relative(got, exact(a, b)) < (4e-3 if dtype == jnp.bfloat16 else 1e-6)


@pytest.mark.parametrize(
    ("groups", "b_scaling", "dtype"),
    [((), "tile", jnp.bfloat16), ((4,), "block", jnp.float32)],
    ids=["forward", "weight gradient of experts"],
)
def test_h100s_run_one_kernel_that_keeps_all_in_registers(
    h100s, in_registers, groups, b_scaling, dtype
):
    M, N, K = 8192, 14336, 4096
    split, whole = P("dp"), P()

    def run(*arrays):
        a, b = Quantized(*arrays[:2]), Quantized(*arrays[2:])
        return fp8_matmul(a, b, out_dtype=dtype, implementation="mosaic")

    rows = N if b_scaling == "block" else N // 128
    shapes = (8 * M, K), (8 * M, K // 128), (N, K), (rows, K // 128)
    if groups:
        shapes = tuple((8 * groups[0], n // 8 if n >= 8 * M else n, k) for n, k in shapes)
    specs = (split, split, *((split if groups else whole),) * 2)
    arrays = list(zip(shapes, (E4M3, jnp.float32) * 2, strict=True))
    program = compile_for(h100s, run, arrays, specs, split)
    kind = "bf16" if dtype == jnp.bfloat16 else "f32"
    result = ",".join(map(str, (*(groups or (1,)), M, N)))
    assert in_registers(program) == [f"{kind}[{result}]"]
    # Nothing but the transposed scales.
    scales = 4 * (groups or (1,))[0] * (M + (N if b_scaling == "block" else 0)) * K // 128
    assert program.memory_analysis().temp_size_in_bytes <= scales
