"""Multiply grouped rows: rows sorted by expert, each times its expert's matrix.

The reference gives every expert a padded part of one batched product, `[E, C, D] x [E, D, F]`. C is a multiple of the
mean, not the largest group: where an expert has more rows, all take another turn. So it is exact for any sizes, its
memory does not depend on them, and rows x experts x F elements exist nowhere (as they do in `lax.ragged_dot` on GPUs).
The kernel (`grouped_matmul_mosaic.py`) pads nothing.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ultrascale_jax.kernels import grouped_matmul_mosaic as mosaic
from ultrascale_jax.kernels.device import choose, match_vma


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    transposed: bool = False,
    axis: int = 0,
    capacity_factor: float = 1.5,
    implementation: str = "auto",
) -> jax.Array:
    """Multiply each row by the matrix of its expert; differentiable in `x` and `w`.

    Args:
      x: `[R, D]`, sorted by expert.
      w: `[E, D, F]` in x's type.
      sizes: `[E]` int32, rows of each expert; their sum is at most R.
      transposed: multiply by the transposes of the experts' matrices, `[E, F, D]`.
      axis: dim of `w` that counts the experts, 0 or 1: with 1 `w` is `[D, E, F]`, as ZeRO-3 gathers it over D.
      capacity_factor: of the reference: rows of an expert in one turn, as a multiple of R / E.
      implementation: `xla`, `mosaic` (bfloat16 on a Hopper GPU; a forced one fails loudly), or `auto`, as `choices.py`
        has it.

    Returns:
      `[R, F]` in x's type; zeros in the rows after the last group, whose gradients are zeros too. Values there must be
      finite.

    Raises:
      ValueError: the implementation is unknown, or the kernel cannot run here or on these shapes.
    """
    (R, D), E, F = x.shape, w.shape[axis], w.shape[1 - axis if transposed else 2]
    fused = choose(
        implementation,
        fits=mosaic.takes(R, D, F) and x.dtype == w.dtype == jnp.bfloat16,
        needs=f"bfloat16, rows in multiples of {mosaic.ALIGNED}, and D and F in multiples of {mosaic.MULTIPLE}",
        got=f"{x.dtype} and {w.dtype}, R={R}, D={D}, F={F}",
        field="grouped_matmul",
    )
    # An expert's rows in one turn: a multiple of 8, as the GPU's matrix units prefer, but at most all.
    capacity = min(R, 8 * math.ceil(capacity_factor * R / E / 8))
    return _grouped_matmul(*match_vma(x, w, sizes), capacity, fused, transposed, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _grouped_matmul(x, w, sizes, capacity: int, fused: bool, transposed: bool, axis: int):
    if fused:
        return mosaic.products(x, w, sizes, transposed=transposed, axis=axis)
    return products(x, jnp.moveaxis(w, axis, 0), sizes, capacity, transposed=transposed)


def _forward(x, w, sizes, *how):
    return _grouped_matmul(x, w, sizes, *how), (x, w, sizes)


def _backward(capacity: int, fused: bool, transposed: bool, axis: int, inputs, dy):
    x, w, sizes = inputs
    dx = _grouped_matmul(dy, w, sizes, capacity, fused, not transposed, axis)
    rows = (dy, x) if transposed else (x, dy)
    if fused:
        return dx, mosaic.weight_gradient(*rows, sizes, axis=axis), None
    dw = weight_gradient(*rows, sizes, capacity).astype(w.dtype)
    return dx, jnp.moveaxis(dw, 0, axis), None


_grouped_matmul.defvjp(_forward, _backward)


def products(
    x: jax.Array, w: jax.Array, sizes: jax.Array, capacity: int, *, transposed: bool = False
) -> jax.Array:
    """Compute `grouped_matmul` by its definition, with `transposed` by w's transposes `[E, F, D]`; no gradients."""
    R, E = x.shape[0], w.shape[0]
    subscripts = "ECF,EDF->ECD" if transposed else "ECD,EDF->ECF"
    # The expert of a row, and the row's number there; rows after the last group are of the last expert.
    row = jnp.arange(R)
    expert = jnp.sum(row[:, None] >= jnp.cumsum(sizes)[None, :-1], axis=1)
    number = row - _starts(sizes)[expert]
    grouped = row < jnp.sum(sizes)

    def turn(n, y):
        padded = jnp.einsum(subscripts, _padded(x, sizes, capacity, n), w)
        slot = number - n * capacity
        inside = grouped & (slot >= 0) & (slot < capacity)
        place = expert * capacity + jnp.clip(slot, 0, capacity - 1)
        return jnp.where(inside[:, None], padded.reshape(E * capacity, -1)[place], y)

    y = jnp.zeros((R, w.shape[1 if transposed else 2]), x.dtype)
    return _turns(turn, y, sizes, capacity, R)


def weight_gradient(x: jax.Array, dy: jax.Array, sizes: jax.Array, capacity: int) -> jax.Array:
    """Return for each expert the transpose of its rows of x times its rows of dy, `[E, D, F]` float32."""

    def turn(n, dw):
        blocks = (_padded(a, sizes, capacity, n) for a in (x, dy))
        return dw + jnp.einsum("ECD,ECF->EDF", *blocks, preferred_element_type=jnp.float32)

    dw = jnp.zeros((sizes.shape[0], x.shape[1], dy.shape[1]), jnp.float32)
    return _turns(turn, dw, sizes, capacity, x.shape[0])


def _turns(turn: Callable, y: jax.Array, sizes: jax.Array, capacity: int, R: int) -> jax.Array:
    """Run `turn(n, y)` for n = 0, 1, ... while an expert has rows left; the first is no part of the loop."""
    y = turn(0, y)
    if capacity >= R:
        return y
    count = (jnp.max(sizes) + capacity - 1) // capacity
    state = jnp.ones_like(count), y
    return lax.while_loop(lambda s: s[0] < count, lambda s: (s[0] + 1, turn(*s)), state)[1]


def _padded(x: jax.Array, sizes: jax.Array, capacity: int, turn: jax.Array | int) -> jax.Array:
    """Return each expert's rows in this turn, `[E, C, D]`, zeros for missing rows."""
    number = turn * capacity + jnp.arange(capacity)
    row = _starts(sizes)[:, None] + number[None, :]
    rows = jnp.take(x, row, axis=0, mode="clip")
    return jnp.where((number[None, :] < sizes[:, None])[..., None], rows, 0)


def _starts(sizes: jax.Array) -> jax.Array:
    return jnp.cumsum(sizes) - sizes
