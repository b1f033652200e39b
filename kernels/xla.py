"""Ask XLA for an order of work, a layout or a buffer: idioms that are always on, and change no result.

What a run may choose is in `config/lowering.py` of the library.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint


def compute_together[Tree](tree: Tree) -> Tree:
    """Return `tree`, of which nothing is used before all of it is computed.

    In a pair `(result, input)` this orders two operations: the one that takes `input` runs after the one that makes
    `result`.
    """
    return lax.optimization_barrier(tree)


def materialised(x: jax.Array) -> jax.Array:
    """Return `x` as an array that XLA writes once: neither fused into what reads it nor computed again for that."""
    return lax.optimization_barrier(x)


@jax.custom_vjp
def gradients_together[Tree](tree: Tree) -> Tree:
    """Return `tree`; in the backward pass no gradient of it is used before all of them are computed.

    With a half-block's input and weights in `tree`, the activations of the feed-forward layer are free before
    attention's backward pass; without it XLA may compute weight gradients later.
    """
    return tree


gradients_together.defvjp(
    lambda tree: (tree, None), lambda _, gradient: (compute_together(gradient),)
)


def uninitialised(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return an array that nobody has set, to be written before it is read."""
    return lax.empty(shape, dtype)


def separate_zeros[Tree](like: Tree) -> Tree:
    """Return arrays of zeros, each written by itself: of equal ones XLA would write one, and copy it for each loop."""
    leaves, tree = jax.tree.flatten(like)
    zeros = compute_together([jnp.zeros((), leaf.dtype) for leaf in leaves])
    return tree.unflatten(
        jnp.full(leaf.shape, zero) for leaf, zero in zip(leaves, zeros, strict=True)
    )


def row_major(x: jax.Array) -> jax.Array:
    """Lay out an array, and its gradient, with the last dim contiguous in memory.

    XLA otherwise lays out a whole chain of operations as its last one wants it: a stack of weights as an all-gather of
    another dim than the first, which the optimizer copies back (1.1 GiB for Llama-3-8B on 8 GPUs); activations as the
    transpose that is quantised.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if x.ndim > 1 else x
