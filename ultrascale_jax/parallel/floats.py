"""Part a tree into the leaves that are differentiated and the others, and put it together again."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

type Tree = Any


def is_float(leaf: Any) -> bool:
    """Return whether an array, or a number, is of floats."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def split_leaves(tree: Tree, chosen: Iterable[bool]) -> tuple[Tree, Tree]:
    """Return a tree's `chosen` leaves, and its others: two trees with None for the leaves of the other."""
    leaves, structure = jax.tree.flatten(tree)
    pairs = [(a, None) if c else (None, a) for a, c in zip(leaves, chosen, strict=True)]
    first, second = ([pair[i] for pair in pairs] for i in range(2))
    return structure.unflatten(first), structure.unflatten(second)


def split_floats(tree: Tree) -> tuple[Tree, Tree]:
    """Return a tree's leaves of floats, and the others, as `split_leaves` does."""
    return split_leaves(tree, map(is_float, jax.tree.leaves(tree)))


def join_leaves(chosen: Tree, remaining: Tree) -> Tree:
    """Invert `split_leaves`."""

    def either(a, b):
        return b if a is None else a

    return jax.tree.map(either, chosen, remaining, is_leaf=lambda leaf: leaf is None)
