"""Part a tree into its leaves of floats, which are differentiated, and its other leaves, and put it together again."""

from typing import Any

import jax
import jax.numpy as jnp

type Tree = Any


def is_float(leaf: Any) -> bool:
    """Return whether an array, or a number, is of floats."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def split_floats(tree: Tree) -> tuple[Tree, Tree]:
    """Return a tree's leaves of floats, and the rest of them: two trees with None for the leaves of the other."""
    floats = jax.tree.map(lambda a: a if is_float(a) else None, tree)
    return floats, jax.tree.map(lambda a: None if is_float(a) else a, tree)


def join_floats(floats: Tree, non_floats: Tree) -> Tree:
    """Invert `split_floats`."""

    def either(a, b):
        return b if a is None else a

    return jax.tree.map(either, floats, non_floats, is_leaf=lambda leaf: leaf is None)
