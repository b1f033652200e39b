"""Multiply grouped rows: rows sorted by expert, each times its expert's matrix.

The reference is `lax.ragged_dot`, which XLA computes on a GPU with rows x experts x D elements in memory. The kernel
(`grouped_matmul_mosaic.py`) pads nothing.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ultrascale_jax.kernels.device import match_vma, takes_mosaic

ALIGNED = 8
"""The kernel takes rows in multiples of it, since a copy from global memory starts there."""

MULTIPLE = 128
"""The kernel takes matrices both of whose dims are multiples of it."""


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    transposed: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """Multiply each row by the matrix of its expert; differentiable in `x` and `w`.

    Args:
      x: `[R, D]`, or `[R, F]` if transposed, sorted by expert.
      w: `[D, E, F]` in x's type, as ZeRO-3 gathers it over D.
      sizes: `[E]` int32, rows of each expert; their sum is at most R.
      transposed: multiply by the transposes of the matrices.
      implementation: `xla`, `mosaic` (bfloat16 on a Hopper GPU; a forced one fails loudly), or `auto`, as `choices.py`
        has it.

    Returns:
      `[R, F]`, or `[R, D]` if transposed, in x's type; zeros in the rows after the last group, whose gradients are
      zeros too. Values there must be finite.

    Raises:
      ValueError: the implementation is unknown, or the kernel cannot run here or on these shapes.
    """
    R, (D, _, F) = x.shape[0], w.shape
    needs = {
        "bfloat16": x.dtype == w.dtype == jnp.bfloat16,
        f"rows in multiples of {ALIGNED}": R % ALIGNED == 0,
        f"D and F that {MULTIPLE} divides": D % MULTIPLE == F % MULTIPLE == 0,
    }
    got = f"{x.dtype} and {w.dtype}, R={R}, D={D}, F={F}"
    fused = takes_mosaic("grouped_matmul", implementation, needs, got)
    x, w, sizes = match_vma(x, w, sizes)
    return (_fused if fused else reference)(x, w, sizes, transposed)


def reference(x: jax.Array, w: jax.Array, sizes: jax.Array, transposed: bool) -> jax.Array:
    """Compute `grouped_matmul` by XLA."""
    return lax.ragged_dot(x, jnp.transpose(w, (1, 2, 0) if transposed else (1, 0, 2)), sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _fused(x, w, sizes, transposed: bool):
    from ultrascale_jax.kernels import grouped_matmul_mosaic as mosaic

    return mosaic.products(x, w, sizes, transposed=transposed)


def _forward(x, w, sizes, transposed):
    return _fused(x, w, sizes, transposed), (x, w, sizes)


def _backward(transposed: bool, inputs, dy):
    from ultrascale_jax.kernels import grouped_matmul_mosaic as mosaic

    x, w, sizes = inputs
    dx = mosaic.products(dy, w, sizes, transposed=not transposed)
    rows = (dy, x) if transposed else (x, dy)
    return dx, mosaic.weight_gradient(*rows, sizes), None


_fused.defvjp(_forward, _backward)
