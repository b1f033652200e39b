"""A matrix with a low-rank adapter (LoRA, arXiv 2106.09685), and the adapter's product on this device's shards."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A weight with an adapter, as it is used."""

    base: Any
    """An array, or one in fp8."""
    a: jax.Array
    """The base's rows, and the rank U last; of experts, all of them first."""
    b: jax.Array
    """U in place of the base's rows, and its columns."""
    scale: float = dataclasses.field(metadata={"static": True})

    def __getitem__(self, index: Any) -> "Adapted":
        """Return itself, whole: a module reads its parameters as `param[...]`."""
        assert index is ...
        return self


def base_of(w: Any) -> Any:
    """Return a weight without its adapter."""
    return w.base if isinstance(w, Adapted) else w


def with_base(w: Any, base: Any) -> Any:
    """Return a weight with another base, and the adapter that it has."""
    return dataclasses.replace(w, base=base) if isinstance(w, Adapted) else base


def low_rank(subscripts: str, x: jax.Array, w: Adapted) -> jax.Array:
    """Return scale * (x a) b on this device's shards; `subscripts` are of x and the base.

    A letter of the base that both other terms have numbers experts.
    """
    rows, matrix, columns = subscripts.replace("->", ",").split(",")
    each = "".join(letter for letter in matrix if letter in rows and letter in columns)
    contracted = "".join(letter for letter in matrix if letter not in columns)
    kept = "".join(letter for letter in rows if letter not in contracted)
    out = "".join(letter for letter in columns if letter not in kept)
    h = w.scale * jnp.einsum(f"{rows},{each}{contracted}U->{kept}U", x, w.a)
    return jnp.einsum(f"{kept}U,{each}U{out}->{columns}", h, w.b)
