"""RMSNorm, alone and of a sum with the residual (arXiv 1910.07467).

XLA's forward pass of the norm alone already moves no byte too many; the kernels (`rms_norm_mosaic.py`) are for the sum,
and for the backward pass, which here recomputes what it needs from the input.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ultrascale_jax.kernels import rms_norm_mosaic as mosaic
from ultrascale_jax.kernels.device import choose, vary_alike


def rms_norm(
    x: jax.Array, weight: jax.Array, *, eps: float, implementation: str = "auto"
) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in float32; differentiable in both.

    Args:
      x: `[..., D]`.
      weight: `[D]` float32.
      eps: added to the mean square.
      implementation: `xla`, `mosaic` (bfloat16, D a multiple of 128 up to 8,192 on a Hopper GPU; a forced one fails
        loudly), or `auto`, which is xla until the kernel has been measured on a GPU.

    Returns:
      `[..., D]` in x's type.

    Raises:
      ValueError: the implementation is unknown, or the kernel cannot run here or on these shapes.
    """
    fused = _choose(implementation, x, weight)
    return _rms_norm(*vary_alike(x, weight), eps, fused)


def add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """`rms_norm` of x + residual, and this sum; for the backward pass only the sum is saved.

    Args:
      x, residual: `[..., D]` of one type.
      weight, eps, implementation: as for `rms_norm`.

    Raises:
      ValueError: as `rms_norm`.
    """
    fused = _choose(implementation, x, weight, residual)
    return _add_rms_norm(*vary_alike(x, residual, weight), eps, fused)


def reference(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """The definition of `rms_norm`."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    weight = lax.broadcast_in_dim(weight.astype(jnp.float32), x.shape, (x.ndim - 1,))
    return (x32 * scale * weight).astype(x.dtype)


def mosaic_applies(x: jax.Array, weight: jax.Array) -> bool:
    """Whether the kernels take these shapes and types."""
    D = x.shape[-1]
    typed = x.dtype == jnp.bfloat16 and weight.dtype == jnp.float32
    return typed and D % mosaic.MULTIPLE == 0 and D <= mosaic.WIDEST


def _choose(implementation: str, x: jax.Array, weight: jax.Array, *others: jax.Array) -> bool:
    types = {a.dtype.name for a in (x, *others)}
    return choose(
        implementation,
        fits=mosaic_applies(x, weight) and len(types) == 1,
        needs=f"bfloat16 with a float32 weight, and D a multiple of {mosaic.MULTIPLE} up to {mosaic.WIDEST}",
        got=f"{' and '.join(sorted(types))} with {weight.dtype}, D={x.shape[-1]}",
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rms_norm(x, weight, eps: float, fused: bool):
    if not fused:
        return reference(x, weight, eps)
    return mosaic.forward(_rows(x), weight, eps)[0].reshape(x.shape)


def _forward(x, weight, eps: float, fused: bool):
    return _rms_norm(x, weight, eps, fused), (x, weight)


def _backward(eps: float, fused: bool, inputs, dy):
    if not fused:
        return jax.vjp(lambda x, weight: reference(x, weight, eps), *inputs)[1](dy)
    x, weight = inputs
    return _kernel_backward(x, weight, dy, eps)


_rms_norm.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _add_rms_norm(x, residual, weight, eps: float, fused: bool):
    if not fused:
        total = x + residual
        return reference(total, weight, eps), total
    normed, total = mosaic.forward(_rows(x), weight, eps, _rows(residual))
    return normed.reshape(x.shape), total.reshape(x.shape)


def _add_forward(x, residual, weight, eps: float, fused: bool):
    normed, total = _add_rms_norm(x, residual, weight, eps, fused)
    return (normed, total), (total, weight)


def _add_backward(eps: float, fused: bool, inputs, gradients):
    (total, weight), (dy, dtotal) = inputs, gradients
    if fused:
        dx, dw = _kernel_backward(total, weight, dy, eps, dtotal)
    else:
        dx, dw = _backward(eps, fused, inputs, dy)
        dx += dtotal
    return dx, dx, dw


_add_rms_norm.defvjp(_add_forward, _add_backward)


def _kernel_backward(x, weight, dy, eps: float, dtotal=None):
    dtotal = None if dtotal is None else _rows(dtotal)
    dx, dw = mosaic.backward(_rows(x), weight, _rows(dy), eps, dtotal)
    return dx.reshape(x.shape), dw


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])
