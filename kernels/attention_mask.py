"""Scores of attention: how they follow from queries and keys, and which keys each query sees.

`visible_keys` is the definition, `BlockMask` the mask of a block of the keys.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

STATIC = {"static": True}

UNSEEN = -1e30
"""Score of a masked key: finite, so that a query without any key has a log-sum-exp."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of queries with H elements: `softcap * tanh(q k^T scale / softcap)`; q k^T / sqrt(H) by default."""

    scale: float | None = None
    """Factor of q k^T; None is 1 / sqrt(H)."""
    softcap: float | None = None
    """Bound of the scores (Gemma 2, arXiv 2408.00118); None is no bound."""

    def divisor(self, head_dim: int) -> float:
        """Return the number by which q k^T is divided."""
        return math.sqrt(head_dim) if self.scale is None else 1 / self.scale


PLAIN_SCORES = Scores()


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockMask:
    """The keys of a block that each query sees; all of them by default."""

    positions: tuple[jax.Array, jax.Array] | None = None
    """Positions of queries `[B or 1, T]` and keys `[B or 1, S]` int32: a query sees keys up to its own position."""
    segment_ids: tuple[jax.Array, jax.Array] | None = None
    """Documents of queries `[B, T]` and keys `[B, S]` int32: a query sees only its own."""
    lengths: tuple[jax.Array, jax.Array] | None = None
    """`[B]` int32 each: so many queries of a row, its first, see as many keys as this says, the first; others none."""
    causal: bool = field(default=False, metadata=STATIC)
    """Query t sees keys up to t; T == S."""
    window: int | None = field(default=None, metadata=STATIC)
    """A query sees the last `window` keys, itself included, by positions if there are any."""

    @property
    def is_array(self) -> bool:
        """Whether an array with a value for each score says which keys are seen."""
        return self.positions is not None or self.segment_ids is not None

    @property
    def causal_window(self) -> int | None:
        """Return the window that belongs to `causal`, and not to positions."""
        return self.window if self.positions is None else None

    def by_arrays(self) -> jax.Array | None:
        """Return the keys that positions and documents allow, as `visible_keys` does; None for all."""
        if self.positions is not None:
            return visible_keys(*self.positions, self.segment_ids, self.window)
        return None if self.segment_ids is None else same_document(*self.segment_ids)

    def dense(self, T: int, S: int) -> jax.Array | None:
        """Return the full mask as `visible_keys` does; None for all keys."""
        allowed = self.by_arrays()
        if self.lengths is not None:
            queries, keys = (first_places(n, x) for n, x in zip((T, S), self.lengths, strict=True))
            return queries[:, :, None] & keys[:, None, :]
        if not self.causal:
            return allowed
        ordered = visible_keys(jnp.arange(T), jnp.arange(S), window=self.causal_window)
        return ordered if allowed is None else ordered & allowed


EVERY_KEY = BlockMask()


def visible_keys(
    q_index: jax.Array,
    k_index: jax.Array,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    window: int | jax.Array | None = None,
) -> jax.Array:
    """Return the keys that each query sees, `[B or 1, T, S]` bool: none after it, of its document, in its window.

    `q_index` and `k_index` are `[T]` or `[B, T]`, and `[S]` or `[B, S]`; `segment_ids` are `([B, T], [B, S])`, and a
    query sees the last `window` keys, itself included.
    """
    q_index, k_index = jnp.atleast_2d(q_index), jnp.atleast_2d(k_index)
    distance = q_index[:, :, None] - k_index[:, None, :]
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    return seen if segment_ids is None else seen & same_document(*segment_ids)


def first_places(size: int, lengths: jax.Array) -> jax.Array:
    """Return `[B, size]` bool, which places come before these lengths `[B]`."""
    return jnp.arange(size, dtype=jnp.int32)[None] < lengths[:, None]


def same_document(q_ids: jax.Array, k_ids: jax.Array) -> jax.Array:
    """Return `[B, T, S]`, which keys are of the document of each query."""
    return q_ids[:, :, None] == k_ids[:, None, :]
