"""RMSNorm on Hopper GPUs: forward and backward read every row once, and nothing is saved between them.

    forward     y = r x w,                            r = 1 / sqrt(mean(x^2) + eps)
    backward    dx = r (dy w - r^2 x mean(dy w x)),   dw = sum over rows of r x dy

The backward pass computes r again. Each program sums dw over its rows in registers; XLA adds up the programs' sums.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax

from ultrascale_jax.kernels.rows_mosaic import LANES, Chunks, for_each_row

MULTIPLE = LANES
"""D is a multiple of it."""

WIDEST = 8192
"""Largest D: of the backward pass with a residual, two rows and the next two are in shared memory at once."""


def forward(
    x: jax.Array,
    weight: jax.Array,
    eps: float,
    residual: jax.Array | None = None,
    *,
    programs: int | None = None,
) -> list[jax.Array]:
    """The norm of x; with a residual the norm of x + residual, and this sum.

    Args:
      x: `[M, D]` bfloat16, D a multiple of 128.
      weight: `[D]` float32.
      residual: as x.
      programs: programs that run at once; none is one on each SM.
    """
    M, D = x.shape
    chunks = Chunks(D)
    rows = [x] if residual is None else [x, residual]

    def step(row, rows, vectors, out, _):
        def normed(at):
            # The sum as the next layers see it.
            parts = [chunks.load(ref, at) for ref in rows]
            return functools.reduce(operator.add, parts).astype(x.dtype)

        squares = chunks.zeros()
        for at in chunks.starts:
            part = normed(at)
            if residual is not None:
                chunks.store(out[1].at[row], at, part)
            squares += jnp.square(part.astype(jnp.float32))
        scale = lax.rsqrt(jnp.sum(squares) / D + eps)
        for at in chunks.starts:
            weight = chunks.load(vectors[0], at)
            chunks.store(out[0].at[row], at, normed(at).astype(jnp.float32) * scale * weight)
        return ()

    out = [jax.ShapeDtypeStruct((M, D // LANES, LANES), x.dtype)] * len(rows)
    name = "rms_norm" if residual is None else "add_rms_norm"
    results = for_each_row(step, name, rows, [weight], out, programs=programs)
    return [y.reshape(M, D) for y in results]


def backward(
    x: jax.Array,
    weight: jax.Array,
    dy: jax.Array,
    eps: float,
    dsum: jax.Array | None = None,
    *,
    programs: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of x, `[M, D]` in its type, and of the weight, `[D]` float32.

    Args:
      x: `[M, D]` bfloat16, what was normed.
      weight: `[D]` float32.
      dy: as x, the gradient of the norm.
      dsum: as x, what else is added to the gradient of x.
      programs: programs that run at once; none is one on each SM.
    """
    M, D = x.shape
    chunks = Chunks(D)

    def step(row, rows, vectors, out, sums):
        x_s, dy_s, *dsum_s = rows
        squares = products = chunks.zeros()
        for at in chunks.starts:
            x, dxw = chunks.load(x_s, at), chunks.load(dy_s, at) * chunks.load(vectors[0], at)
            squares, products = squares + x * x, products + x * dxw
        scale = lax.rsqrt(jnp.sum(squares) / D + eps)
        mean = jnp.sum(products) / D * scale * scale
        dw = []
        for at, total in zip(chunks.starts, sums, strict=True):
            x, dy = chunks.load(x_s, at), chunks.load(dy_s, at)
            dx = (dy * chunks.load(vectors[0], at) - x * mean) * scale
            chunks.store(out[0].at[row], at, sum((chunks.load(ref, at) for ref in dsum_s), dx))
            dw.append(total + dy * (x * scale))
        return tuple(dw)

    rows = [x, dy] if dsum is None else [x, dy, dsum]
    out = [jax.ShapeDtypeStruct((M, D // LANES, LANES), x.dtype)]
    name = "rms_norm_backward" if dsum is None else "add_rms_norm_backward"
    dx, dw = for_each_row(step, name, rows, [weight], out, sums=True, programs=programs)
    return dx.reshape(M, D), dw
