"""Attend to other ranks' keys within packed documents: nothing is computed or sent that no document spans.

A document is a run of equal ids, and a chunk a stretch of the sequence. So a chunk sees keys of an earlier chunk in one
document at most: that of its own first token, if the other's last token is of it too. The block of the two is then a
rectangle without a mask, the first queries of the one and the last keys of the other. It is computed by tiles of
queries, as many as the document has. Keys are sent in reversed order, so that those seen come first.

How far keys go is the largest distance over which any document of any device asks for them: all devices take part in
every hop of all. In zigzag, whose late chunks stand in the opposite direction, keys go both ways. The backward pass
walks home from the farthest place, so that the sums of the keys' gradients arrive with the last hop.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ultrascale_jax.kernels.attention import (
    add_sinks,
    attention_backward,
    attention_forward,
    sinks_gradient,
)
from ultrascale_jax.kernels.attention_mask import UNSEEN, BlockMask
from ultrascale_jax.kernels.device import match_vma
from ultrascale_jax.kernels.residuals import name_attention
from ultrascale_jax.kernels.xla import compute_together
from ultrascale_jax.parallel.context.document_loops import (
    AHEAD,
    BACK,
    FAR_TILES,
    FROM_AFAR,
    TILES,
    chunk_lengths,
    tile_size,
)
from ultrascale_jax.parallel.context.ring import RingSpec, merge
from ultrascale_jax.sharding.rules import varying


class Hops(NamedTuple):
    """The reach of keys in one direction."""

    direction: int
    """1 to the next place, -1 to the one before."""
    count: jax.Array
    """int32 scalar, at least 1, the same on all devices."""
    most: int
    """The largest count that can be."""
    scope: str
    """Name of the loops over them."""


class Ends(NamedTuple):
    """The documents at the ends of chunks: an id, and the number of tokens that the chunk has of it."""

    first: jax.Array
    """`[chunks, 2, B]` int32, of this place."""
    last: jax.Array
    """`[r, chunks, 2, B]` int32, of all places."""


def find_ends(spec: RingSpec, segment_ids: jax.Array) -> Ends:
    """Return the ends of the chunks of documents `[B, T]`."""
    length, _ = chunk_lengths(spec.chunks, segment_ids.shape[1])
    chunks = segment_ids[:, :length], segment_ids[:, length:]
    first, last = (
        jnp.stack([_end(chunk, at) for chunk in chunks[: spec.chunks]]) for at in (0, -1)
    )
    return Ends(first, spec.gather_positions(last))


def _end(ids: jax.Array, at: int) -> jax.Array:
    """Return `[2, B]`, the document of the first or the last token, and how many of `ids` `[B, T]` are of it."""
    if not ids.shape[1]:
        return jnp.zeros_like(ids, shape=(2, ids.shape[0]))
    return jnp.stack([ids[:, at], jnp.sum(ids == ids[:, at, None], axis=1, dtype=jnp.int32)])


class Block(NamedTuple):
    """Queries of this place and keys of another."""

    q_chunk: jax.Array | int
    k_chunk: jax.Array | int
    is_earlier: jax.Array | bool
    """Whether the keys come before the queries."""
    scope: str
    """Name of the loop over its tiles."""


def blocks_at(spec: RingSpec, distance) -> list[Block]:
    """Return the blocks with keys of the place so far before."""
    later = (spec.rank() < distance).astype(jnp.int32)
    if spec.chunks == 1:
        return [Block(0, 0, later == 0, TILES)]
    return [Block(1, 0, True, FAR_TILES), Block(later, later, True, TILES)]


def shared(spec: RingSpec, ends: Ends, distance, block: Block) -> tuple[jax.Array, jax.Array]:
    """Return how many queries and keys `[B]` of a block are of a document that both chunks have."""
    document, queries = ends.first[block.q_chunk]
    other, keys = ends.last[spec.owner(distance), block.k_chunk]
    both = (document == other) & (queries > 0) & (keys > 0) & block.is_earlier
    return jnp.where(both, queries, 0), jnp.where(both, keys, 0)


def count_hops(spec: RingSpec, ends: Ends) -> list[Hops]:
    """Return how far keys must go in each direction; each distance is in one direction alone."""

    def is_needed(distance):
        blocks = blocks_at(spec, distance)
        return functools.reduce(
            jnp.maximum, (shared(spec, ends, distance, x)[0].max() for x in blocks)
        )

    distances = jnp.arange(1, spec.ranks, dtype=jnp.int32)
    needed = jax.vmap(is_needed)(distances) > 0
    needed = jax.lax.pmax(needed.astype(jnp.int32), tuple(sorted(varying(needed)))) > 0
    if spec.chunks == 1 or spec.ranks == 2:
        farthest = jnp.max(jnp.where(needed, distances, 1))
        return [Hops(1, farthest, spec.ranks - 1, AHEAD)]
    # If `d` hops go forward, the next distance that is needed decides how many go back.
    following = jax.lax.cummin(jnp.where(needed, distances, spec.ranks - 1), reverse=True)[1:]
    back = spec.ranks - following
    at = jnp.argmin(distances[:-1] + back)
    most = spec.ranks - 2
    return [Hops(1, distances[at], most, AHEAD), Hops(-1, back[at], most, BACK)]


def _over_tiles(spec: RingSpec, ends: Ends, T: int, distance, state, one: Callable):
    """Fold `one(state, first query, first key, mask)` over the tiles of the blocks at a distance.

    The number of tiles may differ from rank to rank: nothing is sent meanwhile.
    """
    first, second = chunk_lengths(spec.chunks, T)
    size = tile_size(first, second)
    for block in blocks_at(spec, distance):
        queries, keys = shared(spec, ends, distance, block)
        q_start, k_start = block.q_chunk * first, jnp.where(block.k_chunk == 0, second, 0)

        def tile(carry, queries=queries, keys=keys, q_start=q_start, k_start=k_start):
            done, state = carry
            num_queries = jnp.clip(queries - done, 0, size)
            mask = BlockMask(lengths=(num_queries, jnp.where(num_queries > 0, keys, 0)))
            return done + size, one(state, q_start + done, k_start, mask)

        start = match_vma(jnp.int32(0), queries, state)
        with jax.named_scope(block.scope):
            _, state = jax.lax.while_loop(
                lambda carry, queries=queries: carry[0] < queries.max(), tile, (start[0], start[2])
            )
    return state


def _part(x: jax.Array, start, size: int, axis: int = 1) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _replaced(x: jax.Array, part: jax.Array, start, axis: int = 1) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis)


def _reversed_keys(k: jax.Array, v: jax.Array) -> jax.Array:
    """Return keys and values as one array, `[2, B, T, K, H]`, in reversed order."""
    return jnp.stack([k, v])[:, :, ::-1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def document_ring(spec: RingSpec, q, k, v, segment_ids, sinks=None) -> tuple[jax.Array, jax.Array]:
    """Compute causal attention within documents; arguments and results as of `ring`, without windows and positions."""
    return _ring_forward(spec, q, k, v, segment_ids, sinks)[0]


def _ring_forward(spec: RingSpec, q, k, v, segment_ids, sinks):
    out, lse = attention_forward(q, k, v, _own_mask(segment_ids), **spec.how)
    if spec.ranks > 1:
        out, lse = merge((out, lse), _attend_others(spec, q, k, v, segment_ids))
        out = out.astype(q.dtype)
    out, lse = name_attention(*add_sinks(out, lse, sinks))
    return (out, lse), (q, k, v, segment_ids, sinks, out, lse)


def _ring_backward(spec: RingSpec, residuals, cotangents):
    q, k, v, segment_ids, sinks, out, lse = residuals
    dout = cotangents[0]

    def attend_back(q):
        mask = _own_mask(segment_ids)
        return attention_backward(q, k, v, out, lse, dout, mask, **spec.how)

    of_sinks = sinks_gradient(out, lse, dout, sinks)
    if spec.ranks == 1:
        return *attend_back(q), None, of_sinks
    dq_others, sums, bring_home = _gradients_of_others(spec, q, k, v, segment_ids, out, lse, dout)
    # Not before the others are through: then sending the sums home is overlapped with the own block.
    q, sums = compute_together((q, sums))
    dkeys_others = bring_home(sums)
    from_ring = dq_others, *dkeys_others
    dq, dk, dv = (
        (x + y.astype(jnp.float32)).astype(y.dtype)
        for x, y in zip(from_ring, attend_back(q), strict=True)
    )
    return dq, dk, dv, None, of_sinks


document_ring.defvjp(_ring_forward, _ring_backward)


def _own_mask(segment_ids: jax.Array) -> BlockMask:
    """Return the mask of the own block, whose tokens are in increasing order."""
    return BlockMask(segment_ids=(segment_ids, segment_ids), causal=True)


def _attend_others(spec: RingSpec, q, k, v, segment_ids) -> tuple[jax.Array, jax.Array]:
    """Attend to others' keys: the result `[B, T, N, H]` and its log-sum-exp `[B, N, T]`, both in float32."""
    ends, T = find_ends(spec, segment_ids), q.shape[1]
    length, second = chunk_lengths(spec.chunks, T)
    size = tile_size(length, second)

    def attend(state, keys, distance):
        def one(state, q_start, k_start, mask):
            (out, lse), queries = state, _part(q, q_start, size)
            k, v = _part(keys, k_start, length, 2)
            block = attention_forward(queries, k, v, mask, **spec.how)
            sum_before = _part(out, q_start, size), _part(lse, q_start, size, 2)
            part_out, part_lse = merge(sum_before, block)
            return _replaced(out, part_out, q_start), _replaced(lse, part_lse, q_start, 2)

        return _over_tiles(spec, ends, T, distance, state, one)

    B, _, N, _ = q.shape
    unseen = jnp.full_like(q, UNSEEN, jnp.float32, shape=(B, N, T))
    keys, state = _reversed_keys(k, v), (jnp.zeros_like(q, jnp.float32), unseen)
    if spec.gathered:
        everyone = spec.gather_positions(keys)
        return jax.lax.fori_loop(
            1, spec.ranks, lambda d, state: attend(state, _of(spec, everyone, d), d), state
        )
    hops = count_hops(spec, ends)
    arriving = [spec.send(keys, way.direction) for way in hops]
    one = _one_after(arriving[-1]) if len(hops) > 1 else jnp.int32(1)
    for way, keys in zip(hops, arriving, strict=True):
        state = _go(spec, way, keys, state, attend, one)
    return state


def _go(spec: RingSpec, way: Hops, keys, state, attend: Callable, step: jax.Array):
    """Attend to keys that have made their first hop, `step` 1, and to keys of the places beyond."""

    def one(carry):
        step, state, keys = carry
        sent = spec.send(keys, way.direction)
        return step + 1, attend(state, keys, _distance(spec, way, step)), sent

    if way.most > 1:
        with jax.named_scope(way.scope):
            carry = step, state, keys
            step, state, keys = jax.lax.while_loop(lambda c: c[0] < way.count, one, carry)
    return attend(state, keys, _distance(spec, way, step))


def _distance(spec: RingSpec, way: Hops, step) -> jax.Array:
    return way.direction * step % spec.ranks


def _gradients_of_others(spec: RingSpec, q, k, v, segment_ids, out, lse, dout):
    """Return gradients of the queries `[B, T, N, H]` float32, sums of the keys', and how these return."""
    ends, T = find_ends(spec, segment_ids), q.shape[1]
    length, second = chunk_lengths(spec.chunks, T)
    size = tile_size(length, second)

    def add(state, keys, distance):
        def one(state, q_start, k_start, mask):
            dq, dkeys = state
            of_queries = [_part(x, q_start, size) for x in (q, out, dout)]
            k, v = _part(keys, k_start, length, 2)
            part_lse = _part(lse, q_start, size, 2)
            block_dq, *block_dkeys = attention_backward(
                of_queries[0], k, v, of_queries[1], part_lse, of_queries[2], mask, **spec.how
            )
            own_dq = _part(dq, q_start, size) + block_dq.astype(jnp.float32)
            own_dkeys = _part(dkeys, k_start, length, 2)
            own_dkeys += jnp.stack(block_dkeys).astype(jnp.float32)
            return _replaced(dq, own_dq, q_start), _replaced(dkeys, own_dkeys, k_start, 2)

        return _over_tiles(spec, ends, T, distance, state, one)

    keys, dq = _reversed_keys(k, v), jnp.zeros_like(q, jnp.float32)
    if spec.gathered:
        return _backward_gathered(spec, spec.gather_positions(keys), dq, add)
    hops, sums = count_hops(spec, ends), []
    keys *= _one_after(lse).astype(keys.dtype)
    arriving = [spec.send(keys, way.direction) for way in hops]
    one = _one_after(arriving[-1]) if len(hops) > 1 else jnp.int32(1)
    for way, keys in zip(hops, arriving, strict=True):
        dq, dkeys, one = _go_and_return(spec, way, keys, dq, add, one)
        sums.append(dkeys)
    sums = [x * one.astype(x.dtype) for x in sums[:-1]] + sums[-1:]

    def bring_home(sums):
        home = [spec.send(x, -way.direction) for x, way in zip(sums, hops, strict=True)]
        return sum(home[1:], home[0])[:, :, ::-1]

    return dq, sums, bring_home


def _one_after(x: jax.Array) -> jax.Array:
    """Return 1 (int32) by way of `x`, for loops to begin with: collectives of loops that do not depend on each other
    have no order among CPU processes (tests/collective_order.py)."""
    return 1 + (x.ravel()[0] > jnp.inf).astype(jnp.int32)


def _go_and_return(spec: RingSpec, way: Hops, keys, dq, add: Callable, one: jax.Array):
    """Send keys to the farthest place, and walk back with the sums of their gradients, to one hop before home.

    `one` is 1, known after the loops before; the last result is so, too.
    """
    dkeys = jnp.zeros_like(keys, jnp.float32)
    if way.most > 1:

        def go(carry):
            return carry[0] + 1, spec.send(carry[1], way.direction)

        def back(carry):
            step, dq, keys, dkeys = carry
            sent, arrived = spec.send((keys, dkeys), -way.direction)
            start = dq, jnp.zeros_like(dkeys)
            dq, block_dkeys = add(start, keys, _distance(spec, way, step))
            return step - 1, dq, sent, arrived + block_dkeys

        def last(carry):
            return carry[0] + 1, spec.send(carry[1], -way.direction)

        with jax.named_scope(way.scope):
            step, keys = jax.lax.while_loop(lambda c: c[0] < way.count, go, (one, keys))
            carry = step, dq, keys, dkeys
            step, dq, keys, dkeys = jax.lax.while_loop(lambda c: c[0] > 1, back, carry)
            with jax.named_scope(FROM_AFAR):
                few = jnp.minimum(way.count, 2)
                step, dkeys = jax.lax.while_loop(lambda c: c[0] < few, last, (step, dkeys))
        one = jnp.minimum(step, 1)
    return *add((dq, dkeys), keys, _distance(spec, way, jnp.int32(1))), one


def _backward_gathered(spec: RingSpec, everyone, dq, add: Callable):
    """Do the same with gathered keys: gradients for all their owners side by side, and a reduce-scatter."""

    def one(distance, state):
        dq, dkeys = state
        start = dq, jnp.zeros_like(everyone[0], jnp.float32)
        dq, block_dkeys = add(start, _of(spec, everyone, distance), distance)
        owner = spec.owner(distance)
        return dq, jax.lax.dynamic_update_index_in_dim(dkeys, block_dkeys, owner, axis=0)

    dq, sums = jax.lax.fori_loop(1, spec.ranks, one, (dq, jnp.zeros_like(everyone, jnp.float32)))

    def bring_home(sums):
        groups = spec.members()
        return jax.lax.psum_scatter(sums, spec.axis, axis_index_groups=groups)[:, :, ::-1]

    return dq, sums, bring_home


def _of(spec: RingSpec, everyone: jax.Array, distance) -> jax.Array:
    """Return the keys of the place so far before."""
    return jax.lax.dynamic_index_in_dim(everyone, spec.owner(distance), keepdims=False)
