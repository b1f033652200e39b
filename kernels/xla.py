"""Ask XLA for an order of work, a layout, a buffer or an option, none of which changes a result.

The idioms are always on; `config/lowering.py` of the library chooses the options.
"""

import functools
import warnings
from collections.abc import Mapping
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

    XLA otherwise lays out a whole chain of operations as its last one needs it: a stack of weights as an all-gather of
    another dim than the first, which the optimizer copies back (1.1 GiB for Llama-3-8B on 8 GPUs); activations as the
    transpose that is quantised.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if x.ndim > 1 else x


def known_options(options: Mapping[str, int | bool | str]) -> dict[str, int | bool | str]:
    """Return the options of XLA's compiler that the installed one takes; warn of each other one and leave it out."""
    taken = dict(options)
    while taken and (error := _refusal(tuple(taken.items()))):
        refused = next((name for name in taken if name in error), None)
        if refused is None:
            raise RuntimeError(error)
        del taken[refused]
        warnings.warn(f"XLA runs this step without an option: {error}", stacklevel=2)
    return taken


@functools.cache
def _refusal(options: tuple[tuple[str, int | bool | str], ...]) -> str:
    """Return XLA's complaint of the first option that it does not take, or nothing: only a compilation tells."""
    # A mesh of one device, whatever mesh is set, which may be of GPUs that are not there.
    with jax.set_mesh(jax.sharding.Mesh(jax.local_devices()[:1], ("device",))):
        try:
            jax.jit(lambda: 0, compiler_options=dict(options)).lower().compile()
        except jax.errors.JaxRuntimeError as error:
            return str(error)
    return ""
