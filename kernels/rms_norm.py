"""RMSNorm (arXiv 1910.07467); the shortest of the kernels, to read first.

XLA's forward pass already moves no byte too many. The kernel (`rms_norm_mosaic.py`) is the backward pass, which
recomputes what it needs from the input in one read of each row.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ultrascale_jax.kernels.device import match_vma, takes_mosaic

MULTIPLE = 128
"""The kernel takes D in multiples of it: TMA reads a row as `[D / 128, 128]`, at most 256 elements of a dim."""

WIDEST = 8192
"""Largest D of the kernel: a warpgroup carries the weight's gradient, D float32, in its registers."""


def rms_norm(
    x: jax.Array, weight: jax.Array, *, eps: float, implementation: str = "auto"
) -> jax.Array:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dim, in float32; differentiable in both.

    Args:
      x: `[..., D]`.
      weight: `[D]` float32.
      eps: added to the mean square.
      implementation: of the backward pass: `xla`, `mosaic` (bfloat16, D a multiple of 128 up to 8,192 on a Hopper GPU;
        a forced one fails loudly), or `auto`, as `choices.py` has it.

    Returns:
      `[..., D]` in x's type.

    Raises:
      ValueError: the implementation is unknown, or the kernel cannot run here or on these shapes.
    """
    D = x.shape[-1]
    needs = {
        "bfloat16 with a float32 weight": x.dtype == jnp.bfloat16 and weight.dtype == jnp.float32,
        f"D in multiples of {MULTIPLE}": D % MULTIPLE == 0,
        f"D up to {WIDEST}": D <= WIDEST,
    }
    fused = takes_mosaic("norm", implementation, needs, f"{x.dtype} with {weight.dtype}, D={D}")
    x, weight = match_vma(x, weight)
    return (_fused if fused else reference)(x, weight, eps)


def reference(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Compute `rms_norm` by its definition."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    weight = lax.broadcast_in_dim(weight.astype(jnp.float32), x.shape, (x.ndim - 1,))
    return (x32 * scale * weight).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _fused(x, weight, eps: float):
    return reference(x, weight, eps)


def _forward(x, weight, eps: float):
    return reference(x, weight, eps), (x, weight)


def _backward(eps: float, residuals, dy):
    from ultrascale_jax.kernels import rms_norm_mosaic as mosaic

    x, weight = residuals
    D = x.shape[-1]
    dx, dw = mosaic.backward(x.reshape(-1, D), weight, dy.reshape(-1, D), eps)
    return dx.reshape(x.shape), dw


_fused.defvjp(_forward, _backward)
