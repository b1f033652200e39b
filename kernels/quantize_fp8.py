"""Float8 values with scales, chosen from the values themselves (current scaling).

A scale belongs to the whole array, a row, a block of 1 x 128 or 1 x 32, or a tile of 128 x 128, and maps the largest
magnitude there to the largest of the float8 type. Nothing here is differentiable: quantise inside a `custom_vjp`.

XLA reads an array for the scales of each orientation, and once more for the values of both. The kernel
(`quantize_fp8_mosaic.py`) reads blocks and tiles once; scales of a row or of the whole array are XLA's.
"""

import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ultrascale_jax.kernels.device import match_vma, takes_mosaic
from ultrascale_jax.kernels.xla import materialised, row_major

BLOCK = 128
"""Columns of a block; rows and columns of a tile."""

MX_BLOCK = 32
"""Columns of a block of the OCP's microscaling formats."""

E8M0 = jnp.float8_e8m0fnu
"""Powers of 2: type of the scales of these blocks."""

TINY = float(jnp.finfo(jnp.float32).tiny)
"""Smallest scale, whose inverse is finite."""

type Scaling = Literal["tensor", "row", "block", "mx", "tile"]


class Quantized(NamedTuple):
    """An array as float8 `values` `[..., M, K]` times `scales`, each for a part of the last two dims."""

    values: jax.Array
    scales: jax.Array
    """`[]` tensor, `[..., M, 1]` row, `[..., M, ceil(K/128)]` block, `[..., ceil(M/128), ceil(K/128)]` tile, in
    float32; `[..., M, ceil(K/32)]` mx, in a byte each."""

    @property
    def T(self) -> "Quantized":
        """The transpose of the last two dims."""
        return Quantized(*(jnp.swapaxes(a, -1, -2) if a.ndim else a for a in self))


def quantize_fp8(
    x: jax.Array,
    scaling: Scaling,
    *,
    amax: jax.Array | None = None,
    dtype: jax.typing.DTypeLike = jnp.float8_e4m3fn,
    implementation: str = "auto",
) -> Quantized:
    """Convert `x` to float8, each part times the inverse of its scale.

    A scale is the part's largest magnitude over the largest number of `dtype`, rounded up to a power of 2, which loses
    nothing in products; 1 for a part of zeros, or of values so small that the scale would not be a normal number.
    Infinities and NaNs give NaNs.

    Args:
      x: `[..., M, K]` bfloat16 or float32; the last block or tile of a dim may be short.
      scaling: what has a scale of its own: `tensor`, `row`, `block` (1 x 128), `mx` (1 x 32) or `tile`
        (128 x 128).
      amax: `[]`, for scaling `tensor`: the largest magnitude, where x is a shard of the tensor.
      dtype: `float8_e4m3fn` or `float8_e5m2`.
      implementation: `xla`, `mosaic` (scaling `block` or `tile` of bfloat16 `[M, K]`, multiples of 128, on a Hopper
        GPU; a forced one fails loudly), or `auto`, as `choices.py` has it.

    Raises:
      ValueError: scaling, dtype or implementation is unknown, amax does not belong to it, or the kernel cannot run here
        or on these shapes.
    """
    return _quantize(x, scaling, amax, dtype, implementation, both=False)[0]


def quantize_fp8_both(
    x: jax.Array,
    scaling: Scaling,
    *,
    dtype: jax.typing.DTypeLike = jnp.float8_e4m3fn,
    implementation: str = "auto",
) -> tuple[Quantized, Quantized]:
    """Quantise `x` `[..., M, K]` and its transpose `[..., K, M]` as `quantize_fp8` does; the kernel reads x once."""
    straight, turned = _quantize(x, scaling, None, dtype, implementation, both=True)
    return straight, turned


def dequantize(q: Quantized, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Multiply `values` by `scales` in float32."""
    values, scales = (a.astype(jnp.float32) for a in q)
    if scales.ndim:
        (M, K), rows = values.shape[-2:], scales.shape[-2]
        width = MX_BLOCK if scales.shape[-1] == -(-K // MX_BLOCK) else BLOCK
        sizes = 1 if rows == M else BLOCK, K if scales.shape[-1] == 1 else width
        scales = _repeat_over_blocks(scales, sizes, values.shape)
    return (values * scales).astype(dtype)


def _quantize(x, scaling, amax, dtype, implementation, *, both: bool):
    """Quantise x, and its transpose if `both`."""
    if scaling not in ("tensor", "row", "block", "mx", "tile"):
        raise ValueError(f"scaling={scaling!r}: must be tensor, row, block, mx or tile")
    if dtype not in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        raise ValueError(f"dtype={dtype}: must be float8_e4m3fn or float8_e5m2")
    if amax is not None:
        if scaling != "tensor":
            raise ValueError(f"amax is given for scaling={scaling!r}: only 'tensor' takes it")
        x, amax = match_vma(x, amax)
    needs = {
        "scaling block or tile": scaling in ("block", "tile"),
        "bfloat16": x.dtype == jnp.bfloat16,
        f"[M, K] in multiples of {BLOCK}": x.ndim == 2 and not any(n % BLOCK for n in x.shape),
    }
    got = f"{scaling} of {x.dtype} {list(x.shape)}"
    if takes_mosaic("fp8_matmul", implementation, needs, got):
        return kernel(x, scaling, dtype, both=both)
    return tuple(reference(x, scaling, amax, dtype, turned=t) for t in (False, True)[: 1 + both])


def reference(x, scaling: Scaling, amax, dtype, *, turned: bool = False) -> Quantized:
    """Compute `quantize_fp8` of x, or of its transpose, by its definition; values alone are transposed, in float8."""
    x32 = x.astype(jnp.float32)
    if scaling == "tensor":
        amax = _amax(x32) if amax is None else amax.astype(jnp.float32)
        scales = scale_of(amax, dtype)
        q = Quantized(cast(x32, 1 / scales, dtype), scales)
        return q.T if turned else q
    length = x.shape[-2 if turned else -1]
    sizes = {"row": (1, length), "block": (1, BLOCK), "mx": (1, MX_BLOCK), "tile": (BLOCK, BLOCK)}
    part = sizes[scaling][::-1] if turned else sizes[scaling]
    # Else XLA lays out one orientation as the other, and copies x, or the values back.
    amax = row_major(jnp.max(jnp.abs(_blocks(x, part)), axis=(-3, -1)))
    scales = scale_of(amax.astype(jnp.float32), dtype)
    if scaling == "mx":
        # Without the barrier XLA writes float32 too, for the values' kernel to read.
        scales = materialised(scales.astype(E8M0))
    inverse = _repeat_over_blocks(1 / scales.astype(jnp.float32), part, x.shape)
    q = Quantized(row_major(cast(x32, inverse, dtype)), scales)
    return q.T if turned else q


def _amax(x: jax.Array) -> jax.Array:
    """Return the largest magnitude, of that of each row.

    XLA finds a row's in the kernel that makes the row, as of a norm. Without the barrier it takes the maximum of all at
    once, for which such a kernel writes float32 magnitudes and another reads them.
    """
    return jnp.max(materialised(jnp.max(jnp.abs(x), axis=-1)))


def kernel(x, scaling: Scaling, dtype, *, both: bool) -> tuple[Quantized, ...]:
    """Quantise x by the kernel, and its transpose if `both`."""
    from ultrascale_jax.kernels import quantize_fp8_mosaic as mosaic

    scale = functools.partial(scale_of, dtype=dtype)
    results = mosaic.quantize(x, scale, dtype, both=both, tiles=scaling == "tile")
    return tuple(Quantized(*result) for result in results)


def scale_of(amax: jax.Array, dtype) -> jax.Array:
    """Return the float32 scales of parts whose largest magnitudes are `amax`."""
    # Not a division, which XLA turns into this only where it compiles it.
    scale = amax * (1 / float(jnp.finfo(dtype).max))
    scale = jnp.where(scale < TINY, 1.0, scale)
    # One less than a power of 2 is added and the mantissa dropped; infinity stays, but NaN would not.
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    up = lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    return jnp.where(jnp.isnan(scale), scale, up)


def cast(x: jax.Array, inverse: jax.Array, dtype) -> jax.Array:
    """Multiply x by the inverse scales, and clip it: a cast turns larger numbers into NaN or infinity."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x * inverse, -largest, largest).astype(dtype)


def _blocks(x: jax.Array, sizes: tuple[int, int]) -> jax.Array:
    """Reshape `[..., M, K]` to `[..., m, rows, k, columns]`, padded with zeros where that does not divide."""
    counts = [math.ceil(n / size) for n, size in zip(x.shape[-2:], sizes, strict=True)]
    ends = [count * size - n for count, size, n in zip(counts, sizes, x.shape[-2:], strict=True)]
    if any(ends):
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, end) for end in ends])
    return x.reshape(*x.shape[:-2], counts[0], sizes[0], counts[1], sizes[1])


def _repeat_over_blocks(
    scales: jax.Array, sizes: tuple[int, int], shape: tuple[int, ...]
) -> jax.Array:
    """Repeat each number of `[..., m, k]` over its block: `[..., M, K]`."""
    *batch, m, k = scales.shape
    dims = *range(len(batch) + 1), len(batch) + 2
    blocks = lax.broadcast_in_dim(scales, (*batch, m, sizes[0], k, sizes[1]), dims)
    return blocks.reshape(*batch, m * sizes[0], k * sizes[1])[..., : shape[-2], : shape[-1]]
