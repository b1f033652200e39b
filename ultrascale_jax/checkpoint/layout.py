"""The arrays of a checkpoint: two groups of nested dictionaries, whose names are attribute paths."""

from collections.abc import Mapping
from typing import Any

import jax

from ultrascale_jax.train_step.state import TrainState

PARAMS, TRAIN = "params", "train"
"""Names of the two groups."""

type Groups = dict[str, dict]
"""Arrays, or their shapes, by group and attribute path."""


def named(groups: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays by their full name, as `params/stacks/0/attn/w_q`."""
    leaves = jax.tree_util.tree_flatten_with_path(groups)[0]
    return {name(keys): leaf for keys, leaf in leaves}


def name(keys: tuple) -> str:
    """Return the full name of the array at these keys of nested dictionaries."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def split(state: TrainState) -> dict[str, dict]:
    """Split `state` (or its shapes) into the two groups of a checkpoint, nested dictionaries by attribute path."""
    tree = flatten(state)
    assert not {"frozen", "reference"} & set(tree), "frozen models are no part of a checkpoint"
    return {PARAMS: tree.pop("params"), TRAIN: tree}


def join(groups: dict[str, dict], like: TrainState) -> TrainState:
    """Invert `split`, in the structure of `like`."""
    return unflatten({"params": groups[PARAMS], **groups[TRAIN]}, like)


def _path(keys: tuple) -> list[str]:
    """Return the attribute path of a leaf, without the node (`value`) that an `nnx.Param` adds."""
    words = [jax.tree_util.keystr((key,), simple=True) for key in keys]
    return words[:-1] if len(words) > 1 and words[-1] in ("value", "raw_value") else words


def flatten(tree) -> dict:
    """Return the leaves of a tree of modules and dataclasses as nested dictionaries, by attribute path."""
    nested: dict = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        *outer, last = _path(keys)
        node = nested
        for word in outer:
            node = node.setdefault(word, {})
        node[last] = leaf
    return nested


def unflatten[Tree](nested: dict, like: Tree) -> Tree:
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    leaves = []
    for keys, _ in paths:
        node = nested
        for word in _path(keys):
            node = node[word]
        leaves.append(node)
    return jax.tree_util.tree_unflatten(structure, leaves)
