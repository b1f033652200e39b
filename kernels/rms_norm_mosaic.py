"""RMSNorm on Hopper GPUs: forward and backward read every row once, and nothing is saved between them.

    forward     y = r x w,                            r = 1 / sqrt(mean(x^2) + eps)
    backward    dx = r (dy w - r^2 x mean(dy w x)),   dw = sum over rows of r x dy

The backward pass computes r again. Each program sums dw over its rows in registers; XLA adds up the programs' sums.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ultrascale_jax.kernels.rows_mosaic import LANES, Chunks, for_each_row

MULTIPLE = LANES
"""D is a multiple of it."""

WIDEST = 8192
"""Largest D: a warpgroup carries the weight's gradient, D float32, in its registers."""


def forward(
    x: jax.Array, weight: jax.Array, eps: float, *, programs: int | None = None
) -> jax.Array:
    """The norm of each row.

    Args:
      x: `[M, D]` bfloat16, D a multiple of 128.
      weight: `[D]` float32.
      eps: added to the mean square.
      programs: programs that run at once; none is one on each SM.

    Returns:
      As x.
    """
    chunks = Chunks(x.shape[1])

    def step(rows, weight_s, y_g, _):
        squares = chunks.zeros()
        for at in chunks.starts:
            squares += jnp.square(chunks.load(rows[0], at))
        scale = lax.rsqrt(jnp.sum(squares) / x.shape[1] + eps)
        for at in chunks.starts:
            chunks.store(y_g, at, chunks.load(rows[0], at) * scale * chunks.load(weight_s, at))
        return ()

    return for_each_row(step, "rms_norm", [x], weight, programs=programs)[0]


def backward(
    x: jax.Array, weight: jax.Array, dy: jax.Array, eps: float, *, programs: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Gradients of x, `[M, D]` in its type, and of the weight, `[D]` float32.

    Args:
      x, weight, eps, programs: as in `forward`.
      dy: as x, the gradient of the norm.
    """
    chunks, D = Chunks(x.shape[1]), x.shape[1]

    def step(rows, weight_s, dx_g, sums):
        x_s, dy_s = rows
        squares = products = chunks.zeros()
        for at in chunks.starts:
            x, dxw = chunks.load(x_s, at), chunks.load(dy_s, at) * chunks.load(weight_s, at)
            squares, products = squares + x * x, products + x * dxw
        scale = lax.rsqrt(jnp.sum(squares) / D + eps)
        mean = jnp.sum(products) / D * scale * scale
        dw = []
        for at, total in zip(chunks.starts, sums, strict=True):
            x, dy = chunks.load(x_s, at), chunks.load(dy_s, at)
            chunks.store(dx_g, at, (dy * chunks.load(weight_s, at) - x * mean) * scale)
            dw.append(total + dy * (x * scale))
        return tuple(dw)

    dx, dw = for_each_row(step, "rms_norm_backward", [x, dy], weight, sums=True, programs=programs)
    return dx, dw
