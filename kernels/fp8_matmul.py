"""Multiply two fp8 arrays with a scale for every block of 128 along the contracted dim (DeepSeek-V3's recipe).

The reference multiplies in float32 what the scales and values say: the exact definition, and slow. The kernel
(`fp8_matmul_mosaic.py`) multiplies fp8. Nothing here is differentiable: call it inside a `custom_vjp`.
"""

import jax
import jax.numpy as jnp

from ultrascale_jax.kernels.device import match_vma, takes_mosaic
from ultrascale_jax.kernels.quantize_fp8 import BLOCK, Quantized, dequantize

TYPES = jnp.float8_e4m3fn, jnp.float8_e5m2
"""Types that the kernel multiplies."""


def fp8_matmul(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    implementation: str = "auto",
) -> jax.Array:
    """Return `a b^T`, contracted along the last dim of both. Sums are float32.

    Args:
      a: `[M, K]` in blocks of 1 x 128: scales `[M, ceil(K / 128)]`.
      b: `[N, K]` in tiles of 128 x 128 (weights), or in blocks of 1 x 128. Both may have one leading dim of groups.
      out_dtype: bfloat16, or float32 (gradients of weights).
      implementation: `xla`, `mosaic` (float8_e4m3fn or float8_e5m2, M, N and K multiples of 128, on a Hopper GPU; a
        forced one fails loudly), or `auto`, as `choices.py` has it.

    Returns:
      `[M, N]`, or `[G, M, N]`.

    Raises:
      ValueError: the scales are not of blocks, the implementation is unknown, or the kernel cannot run here or on
        these shapes.
    """
    shapes = a.values.shape, a.scales.shape, b.values.shape, b.scales.shape
    if not _in_blocks(*shapes):
        raise ValueError(
            f"a has values {shapes[0]} and scales {shapes[1]}, b {shapes[2]} and {shapes[3]}: must be [M, K] in blocks "
            f"of 1 x {BLOCK} and [N, K] in blocks or in tiles of {BLOCK} x {BLOCK}, both or neither with groups"
        )
    fused = _takes_kernel(implementation, a.values, b.values, jnp.dtype(out_dtype))
    arrays = match_vma(*a, *b)
    if not fused:
        return _reference(Quantized(*arrays[:2]), Quantized(*arrays[2:]), out_dtype)
    from ultrascale_jax.kernels import fp8_matmul_mosaic as mosaic

    if a.values.ndim == 3:
        return mosaic.products(*arrays, out_dtype=out_dtype)
    return mosaic.products(*(x[None] for x in arrays), out_dtype=out_dtype)[0]


def _in_blocks(a: tuple, a_scales: tuple, b: tuple, b_scales: tuple) -> bool:
    """Return whether these are the shapes of values and scales that `fp8_matmul` takes."""
    if len(a) not in (2, 3) or len(b) != len(a) or (*a[:-2], a[-1]) != (*b[:-2], b[-1]):
        return False
    blocks = -(-a[-1] // BLOCK)
    rows = b[-2], -(-b[-2] // BLOCK)
    return a_scales == (*a[:-1], blocks) and b_scales in [(*b[:-2], n, blocks) for n in rows]


def _takes_kernel(implementation: str, a: jax.Array, b: jax.Array, out_dtype: jnp.dtype) -> bool:
    """Return whether the kernel multiplies a `[..., M, K]` and b `[..., N, K]`."""
    (M, K), N = a.shape[-2:], b.shape[-2]
    needs = {
        "float8_e4m3fn or float8_e5m2": a.dtype in TYPES and b.dtype in TYPES,
        "a result in bfloat16 or float32": out_dtype in (jnp.bfloat16, jnp.float32),
        f"dims that {BLOCK} divides": M % BLOCK == N % BLOCK == K % BLOCK == 0,
    }
    got = f"{a.dtype} and {b.dtype} to {out_dtype}, M={M}, N={N}, K={K}"
    return takes_mosaic("fp8_matmul", implementation, needs, got)


def _reference(a: Quantized, b: Quantized, out_dtype) -> jax.Array:
    """Compute `fp8_matmul` by its definition."""
    y = jnp.einsum(
        "...mk,...nk->...mn",
        *(dequantize(q, jnp.float32) for q in (a, b)),
        precision="highest",
    )
    return y.astype(out_dtype)
