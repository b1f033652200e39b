"""Masks of attention as one range of keys for each query, which `attention_mosaic.py` reads; no array is `[T, S]`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ultrascale_jax.kernels.attention_mask import BlockMask, first_places

FIRST = -(2**31)
"""An index before any."""


class Ranges(NamedTuple):
    """The keys that each query sees: `start <= s < end`, both `[B, T]` int32; start >= end for no keys."""

    start: jax.Array
    end: jax.Array


def ranges_of(mask: BlockMask, B: int, T: int, S: int) -> Ranges:
    """Return a mask as ranges `[B, T]`."""
    if mask.lengths is not None:
        queries, keys = mask.lengths
        ranges = Ranges(jnp.int32(0), jnp.where(first_places(T, queries), keys[:, None], 0))
    elif mask.is_array or mask.causal:
        # Without an order a query comes after all keys.
        last = jnp.arange(T) if mask.causal else jnp.full(T, S)
        positions = mask.positions or (last, jnp.arange(S))
        ranges = visible_ranges(*positions, mask.segment_ids, mask.window)
    else:
        ranges = Ranges(jnp.int32(0), jnp.int32(S))
    return Ranges(*(jnp.broadcast_to(x, (B, T)) for x in ranges))


def visible_ranges(
    q_index: jax.Array,
    k_index: jax.Array,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    window: int | None = None,
) -> Ranges:
    """Return `visible_keys` of these arguments as ranges, `[B or 1, T]`.

    The keys are one range where the ids of documents do not decrease, and indices increase along each document.
    """
    q_index, k_index = jnp.atleast_2d(q_index), jnp.atleast_2d(k_index)
    q_ids, k_ids = segment_ids or (jnp.zeros_like(q_index), jnp.zeros_like(k_index))
    B = max(x.shape[0] for x in (q_index, k_index, q_ids, k_ids))
    q_index, k_index, q_ids, k_ids = (
        jnp.broadcast_to(x, (B, x.shape[1])) for x in (q_index, k_index, q_ids, k_ids)
    )
    unseen = jnp.full_like(q_index, FIRST) if window is None else q_index - window
    start, end = (jax.vmap(_count_until)(k_ids, k_index, q_ids, x) for x in (unseen, q_index))
    return Ranges(start, end)


def _count_until(k_ids, k_index, q_ids, q_index) -> jax.Array:
    """Count the keys `[S]` before or at each query `[T]`, by document and then by index, by bisection."""
    S, count = k_index.shape[0], jnp.zeros_like(q_index)
    for bit in reversed(range(S.bit_length())):
        larger = count + (1 << bit)
        last = jnp.minimum(larger, S) - 1
        ids, index = k_ids[last], k_index[last]
        visible = (ids < q_ids) | ((ids == q_ids) & (index <= q_index))
        count = jnp.where((larger <= S) & visible, larger, count)
    return count
