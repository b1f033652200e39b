"""Part a model's parameters in two, trained and frozen ones, and put them together again."""

from collections.abc import Callable

import jax

from ultrascale_jax.models.fp8 import is_variable


def partition[M](model: M, chosen: Callable[[str], bool]) -> tuple[M, M]:
    """Return the model with the parameters whose path is `chosen`, and with the others.

    A path is dotted, as `stacks.0.attn.w_q`. None is in place of the arrays of the other part.
    """

    def part(keeps_chosen: bool) -> M:
        def leaf(path, variable):
            is_chosen = chosen(jax.tree_util.keystr(path, simple=True, separator="."))
            return variable if is_chosen == keeps_chosen else variable.replace(None)

        return jax.tree.map_with_path(leaf, model, is_leaf=is_variable)

    return part(True), part(False)


def combine[M](one: M, other: M) -> M:
    """Invert `partition`."""

    def leaf(a, b):
        return b if a.get_value() is None else a

    return jax.tree.map(leaf, one, other, is_leaf=is_variable)


def is_adapter(path: str | tuple) -> bool:
    """Return whether a parameter is an adapter's: its path is dotted, or a leaf's in a tree."""
    dotted = (
        path if isinstance(path, str) else jax.tree_util.keystr(path, simple=True, separator=".")
    )
    return ".lora." in dotted


def split_adapters[M](model: M) -> tuple[M, M]:
    """Return the model with its adapters alone, and without them, as `partition` does."""
    return partition(model, is_adapter)
