"""Compute ring attention on the shards of one mesh axis: send blocks of keys round, and join their results.

A rank's local block needs no other rank. Then, for each distance on the ring, comes a block with the keys of the rank
that far before; meanwhile the next keys are sent. The backward pass goes round in the same way, and the sums of the
keys' gradients follow them one step behind, so that sending them too is overlapped with a block. The local block waits
for none, and fills the time until the sums are home. Equal steps are one loop, compiled once.

`attention.py` has the public functions, and the strategies.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ultrascale_jax.kernels.attention import (
    add_sinks,
    attention_backward,
    attention_forward,
    branch_by_window,
    sinks_gradient,
)
from ultrascale_jax.kernels.attention_mask import PLAIN_SCORES, UNSEEN, BlockMask, Scores
from ultrascale_jax.kernels.residuals import name_attention
from ultrascale_jax.kernels.xla import compute_together
from ultrascale_jax.parallel.context.window import distances_in_reach

NEVER = 2**30
"""Position of the padding of an odd shard: no query sees it."""


@dataclass(frozen=True)
class RingSpec:
    """The static description of a ring."""

    axis: str
    ranks: int
    """Positions of the ring (r)."""
    ulysses: int
    """Ranks that share a position."""
    chunks: int
    """1: natural order; 2: chunks i and 2r-1-i."""
    gathered: bool
    """Whether keys and values are gathered, and not sent from rank to rank."""
    window: int | None
    local_mask: bool
    """The rank's local block needs more than a causal mask."""
    implementation: str
    placed: bool = True
    """Positions are the places in the sequence: only then can a rank be known to be outside the window."""
    causal: bool = True
    """Queries see no later keys. Without it every rank sees all others, in natural order."""
    scores: Scores = PLAIN_SCORES

    def rank(self) -> jax.Array:
        """Return this rank's position on the ring."""
        return jax.lax.axis_index(self.axis) // self.ulysses

    def index(self, T: int) -> jax.Array:
        """Return `[1, T]` int32: the places in the sequence that this rank's shard has."""
        rank = self.rank()
        if self.chunks == 1:
            return (rank * T + jnp.arange(T))[None]
        first, second = -(-T // 2), T // 2
        second_start = self.ranks * first + (self.ranks - 1 - rank) * second
        return jnp.concatenate(
            [rank * first + jnp.arange(first), second_start + jnp.arange(second)]
        )[None]

    def distances(self, T: int) -> list[int]:
        """Return the distances on the ring over which some rank sees keys of another, in increasing order."""
        window = self.window if self.placed else None
        return distances_in_reach(self.ranks, self.chunks, T, window)

    def send(self, tree: Any, hop: int) -> Any:
        """Pass x on round the ring: return that of the rank `hop` positions before this one."""
        n = self.ranks * self.ulysses
        pairs = [(i, (i + hop * self.ulysses) % n) for i in range(n)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, pairs), tree)

    def exchange(self, x: jax.Array, split_axis: int, concat_axis: int) -> jax.Array:
        """All-to-all among the ranks that share a position: split one dim over them, and join another."""
        groups = self.positions()
        return jax.lax.all_to_all(
            x, self.axis, split_axis, concat_axis, axis_index_groups=groups, tiled=True
        )

    def gather(self, x: jax.Array) -> jax.Array:
        """All-gather dim 1 among the ranks that share a position."""
        groups = self.positions()
        return jax.lax.all_gather(x, self.axis, axis=1, axis_index_groups=groups, tiled=True)

    @property
    def how(self) -> dict[str, Any]:
        """The arguments of a block's attention that are the same for all blocks."""
        return {"scores": self.scores, "implementation": self.implementation}

    def owner(self, distance) -> jax.Array:
        """Return the position that is so far before this one."""
        return (self.rank() - distance) % self.ranks

    def gather_positions[Tree](self, tree: Tree) -> Tree:
        """Gather the arrays of all positions, `[r, ...]` each."""
        groups = self.members()
        return jax.tree.map(
            lambda x: jax.lax.all_gather(x, self.axis, axis_index_groups=groups), tree
        )

    def positions(self) -> list[list[int]]:
        """Return the ranks that share each position."""
        return [[at * self.ulysses + i for i in range(self.ulysses)] for at in range(self.ranks)]

    def members(self) -> list[list[int]]:
        """Return the rings: ranks at the same place of their position."""
        return [
            [ring * self.ulysses + i for ring in range(self.ranks)] for i in range(self.ulysses)
        ]

    def split(self, x: jax.Array, axis: int = 1, fill: int = 0) -> jax.Array:
        """Split `x` into its chunks along a new first dim, all of the length of the first chunk."""
        if self.chunks == 1:
            return x[None]
        first, second = jnp.split(x, [-(-x.shape[axis] // 2)], axis)
        if missing := first.shape[axis] - second.shape[axis]:
            pads = [(0, missing if i == axis else 0) for i in range(x.ndim)]
            second = jnp.pad(second, pads, constant_values=fill)
        return jnp.stack([first, second])

    def join(self, chunks: Sequence[jax.Array] | jax.Array, T: int, axis: int = 1) -> jax.Array:
        """Invert `split`, back to length T."""
        whole = chunks[0] if self.chunks == 1 else jnp.concatenate(list(chunks), axis)
        return jax.lax.slice_in_dim(whole, 0, T, axis=axis)


def _by_window(run, spec: RingSpec, positions, segment_ids, full, T: int):
    """Return `run(spec, positions)`, of a ring without a window where `full` says so.

    Without one, blocks need masks, and so positions, only of documents or of an odd shard.
    """
    has_documents = segment_ids is not None or not spec.placed
    masked = has_documents or T % spec.chunks > 0

    def run_one(spec: RingSpec):
        if spec.window is not None or full is None:
            return run(spec, positions)
        return run(replace(spec, local_mask=has_documents), positions if masked else None)

    return branch_by_window(run_one, spec, full)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring(
    spec: RingSpec, q, k, v, positions, segment_ids, full=None, sinks=None
) -> tuple[jax.Array, jax.Array]:
    """Compute attention over the ring `[B, T, N, H]`, in q's type, and its log-sum-exp `[B, N, T]` float32.

    Args:
      spec: the ring.
      q: queries `[B, T, N, H]` of this rank's position on it, in the ring's order.
      k: keys `[B, S, K, H]`; S is T if the ring is causal.
      v: values `[B, S, K, H]`.
      positions: `[B or 1, T]` int32, or none where no block needs a mask of them.
      segment_ids: `[B, T]` int32 documents, or none.
      full: bool scalar, there is no window after all; or none.
      sinks: `[N]` float32, a logit more of each head, which counts as one block more of value zero; or none.
    """
    return _ring_fwd(spec, q, k, v, positions, segment_ids, full, sinks)[0]


def _ring_fwd(spec: RingSpec, q, k, v, positions, segment_ids, full, sinks):
    def run(spec, positions):
        return _forward(spec, q, k, v, positions, segment_ids)

    out, lse = _by_window(run, spec, positions, segment_ids, full, q.shape[1])
    out, lse = name_attention(*add_sinks(out, lse, sinks))
    return (out, lse), (q, k, v, positions, segment_ids, full, sinks, out, lse)


def _forward(spec: RingSpec, q, k, v, positions, segment_ids):
    """Return the result and its log-sum-exp."""
    mask = _local_mask(spec, positions, segment_ids)
    out, lse = attention_forward(q, k, v, mask, **spec.how)
    if distances := spec.distances(q.shape[1]):
        # So the masks are this layer's: else JAX computes them for all distances at once, before the loop over layers.
        documents = compute_together((q, positions, segment_ids))[1:]
        queries = _chunks(spec, *documents, q=q)
        keys = _chunks(spec, *documents, kv=jnp.stack([k, v]))
        rank, last = spec.rank(), _at(queries, spec.chunks - 1)
        done = tuple(zip(spec.split(out.astype(jnp.float32)), spec.split(lse, 2), strict=True))

        def attend(done, keys, distance):
            later = rank < distance
            if spec.chunks == 1:
                out, lse = _block(spec, last, _at(keys, 0))
                lse = jnp.where(later, UNSEEN, lse) if spec.causal else lse
                return (merge(done[0], (out, lse)),)
            cross = _block(spec, last, _at(keys, 0))
            out, lse = _block(spec, _at(queries, later), _at(keys, later))
            first = merge(done[0], (out, jnp.where(later, UNSEEN, lse)))
            return first, merge(done[1], cross, (out, jnp.where(later, lse, UNSEEN)))

        outs, lses = zip(*_forward_blocks(spec, distances, keys, done, attend), strict=True)
        out = spec.join(outs, q.shape[1]).astype(q.dtype)
        lse = spec.join(lses, q.shape[1], 2)
    return out, lse


def _ring_bwd(spec: RingSpec, residuals, cotangents):
    q, k, v, positions, segment_ids, full, sinks, out, lse = residuals

    def run(spec, positions):
        return _backward(spec, q, k, v, positions, segment_ids, out, lse, cotangents[0])

    gradients = _by_window(run, spec, positions, segment_ids, full, q.shape[1])
    return *gradients, None, None, None, sinks_gradient(out, lse, cotangents[0], sinks)


def _backward(spec: RingSpec, q, k, v, positions, segment_ids, out, lse, dout):
    """Return the gradients of q, k and v."""
    T, mask = q.shape[1], _local_mask(spec, positions, segment_ids)
    distances = spec.distances(T)

    def attend_back(q):
        return attention_backward(q, k, v, out, lse, dout, mask, **spec.how)

    if not distances:
        return attend_back(q)
    queries = _chunks(spec, positions, segment_ids, q=q, out=out, dout=dout)
    queries["lse"] = spec.split(lse, 2)
    keys = _chunks(spec, positions, segment_ids, kv=jnp.stack([k, v]))
    rank, last = spec.rank(), _at(queries, spec.chunks - 1)

    def add(dqs, keys, distance):
        later = rank < distance
        if spec.chunks == 1:
            dq, dkv = _pull_back(spec, last, _at(keys, 0))
            if not spec.causal:
                return (dqs[0] + dq,), dkv[None]
            return (dqs[0] + jnp.where(later, 0, dq),), jnp.where(later, 0, dkv)[None]
        cross, dkv_cross = _pull_back(spec, last, _at(keys, 0))
        dq, dkv = _pull_back(spec, _at(queries, later), _at(keys, later))
        dqs = dqs[0] + jnp.where(later, 0, dq), dqs[1] + cross + jnp.where(later, dq, 0)
        first = dkv_cross + jnp.where(later, 0, dkv)
        return dqs, jnp.stack([first, jnp.where(later, dkv, 0)])

    start = (jnp.zeros_like(last["q"], jnp.float32),) * spec.chunks
    back = _backward_gathered if spec.gathered else _backward_blocks
    dqs, sums, return_grads = back(spec, distances, keys, start, add)
    # Not before the ring is through: then sending the sums home is overlapped with the local block.
    q, sums = compute_together((q, sums))
    dkv_ring = spec.join(return_grads(sums), k.shape[1], 2)
    dq, dk, dv = attend_back(q)
    dq = (spec.join(dqs, T) + dq.astype(jnp.float32)).astype(q.dtype)
    dk, dv = (
        (x + y.astype(jnp.float32)).astype(k.dtype) for x, y in zip(dkv_ring, (dk, dv), strict=True)
    )
    return dq, dk, dv


ring.defvjp(_ring_fwd, _ring_bwd)


def _local_mask(spec: RingSpec, positions, segment_ids) -> BlockMask:
    """Return the mask of the rank's local block. Its shard is in increasing order, so it is causal by index."""
    segments = None if segment_ids is None else (segment_ids, segment_ids)
    if not spec.causal:
        return BlockMask(segment_ids=segments)
    if not spec.local_mask:
        return BlockMask(causal=True, window=spec.window)
    return BlockMask(
        positions=(positions, positions), segment_ids=segments, causal=True, window=spec.window
    )


def _chunks(spec: RingSpec, positions, segment_ids, **arrays) -> dict[str, Any]:
    """Return the arrays chunk by chunk, with positions and documents; keys and values are one array and one message."""
    parts = {name: spec.split(x, axis=x.ndim - 3) for name, x in arrays.items()}
    masks = {"positions": (positions, NEVER), "segments": (segment_ids, 0)}
    return parts | {
        name: None if x is None else spec.split(x, fill=fill) for name, (x, fill) in masks.items()
    }


def _at(parts: dict[str, Any], chunk: jax.Array | int) -> dict[str, Any]:
    """Return one chunk of everything."""
    chunk = jnp.int32(chunk)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, chunk, keepdims=False), parts)


def _mask(spec: RingSpec, queries: dict, keys: dict) -> BlockMask:
    """Return the mask of a block of another rank's keys; every key if all queries come later."""
    segments = None if queries["segments"] is None else (queries["segments"], keys["segments"])
    if queries["positions"] is None:
        return BlockMask(segment_ids=segments)
    positions = queries["positions"], keys["positions"]
    return BlockMask(positions=positions, segment_ids=segments, window=spec.window)


def _block(spec: RingSpec, queries: dict, keys: dict) -> tuple[jax.Array, jax.Array]:
    k, v = keys["kv"]
    mask = _mask(spec, queries, keys)
    return attention_forward(queries["q"], k, v, mask, **spec.how)


def _pull_back(spec: RingSpec, queries: dict, keys: dict) -> tuple[jax.Array, jax.Array]:
    """Return gradients of a block's q, and of its k and v as one array, in float32."""
    q, out, lse, dout = (queries[name] for name in ("q", "out", "lse", "dout"))
    (k, v), mask = keys["kv"], _mask(spec, queries, keys)
    dq, dk, dv = attention_backward(q, k, v, out, lse, dout, mask, **spec.how)
    return dq.astype(jnp.float32), jnp.stack([dk, dv]).astype(jnp.float32)


def merge(done, *blocks) -> tuple[jax.Array, jax.Array]:
    """Merge the results of blocks with different keys: `[B, T, N, H]` float32 and `[B, N, T]`."""
    parts = (done, *blocks)
    total = functools.reduce(jnp.logaddexp, (lse for _, lse in parts))
    shares = (jnp.moveaxis(jnp.exp(lse - total), 1, 2)[..., None] for _, lse in parts)
    terms = (out.astype(jnp.float32) * share for (out, _), share in zip(parts, shares, strict=True))
    return functools.reduce(jnp.add, terms), total


def _forward_blocks(spec: RingSpec, distances: list[int], keys, carry, attend):
    """Run `attend(carry, keys, distance)` for the keys at each of these distances."""
    if spec.gathered:
        everyone = spec.gather_positions(keys)

        def look(carry, distance):
            return attend(carry, _at(everyone, spec.owner(distance)), distance), None

        return jax.lax.scan(look, carry, jnp.array(distances))[0]
    keys = spec.send(keys, distances[0])
    for (_, hop), group in _runs_of_hops(distances, arrivals=False):

        def one(state, distance, hop=hop):
            carry, keys = state
            sent = spec.send(keys, hop) if hop else keys
            return (attend(carry, keys, distance), sent), None

        carry, keys = _repeat(one, (carry, keys), group)
    return carry


def _backward_blocks(spec: RingSpec, distances: list[int], keys, dqs, add):
    """Return the queries' gradients; sum the keys' gradients one step behind the keys, and send them home."""
    keys, dkeys = spec.send(keys, distances[0]), None
    for (prev_hop, hop), group in _runs_of_hops(distances, arrivals=True):

        def one(state, distance, prev_hop=prev_hop, hop=hop):
            dqs, keys, dkeys = state
            sent = spec.send(keys, hop) if hop else keys
            arrived = spec.send(dkeys, prev_hop) if prev_hop else 0
            dqs, block_dkeys = add(dqs, keys, distance)
            return (dqs, sent, arrived + block_dkeys), None

        dqs, keys, dkeys = _repeat(one, (dqs, keys, dkeys), group)
    return dqs, dkeys, functools.partial(spec.send, hop=spec.ranks - distances[-1])


def _backward_gathered(spec: RingSpec, distances: list[int], keys, dqs, add):
    """Do the same with gathered keys: gradients for all their owners side by side, and a reduce-scatter."""
    everyone = spec.gather_positions(keys)

    def one(state, distance):
        dqs, dkeys = state
        owner = spec.owner(distance)
        dqs, dkeys_of_owner = add(dqs, _at(everyone, owner), distance)
        dkeys = jax.lax.dynamic_update_index_in_dim(dkeys, dkeys_of_owner, owner, axis=0)
        return (dqs, dkeys), None

    start = jnp.zeros_like(everyone["kv"], jnp.float32)
    (dqs, dkeys), _ = jax.lax.scan(one, (dqs, start), jnp.array(distances))
    return_grads = functools.partial(
        jax.lax.psum_scatter, axis_name=spec.axis, axis_index_groups=spec.members()
    )
    return dqs, dkeys, return_grads


def _runs_of_hops(distances: list[int], *, arrivals: bool) -> Iterator[tuple[tuple, list[int]]]:
    """Group distances into runs with the same (hop from the one before, if `arrivals` count; hop to the next)."""
    hops = [b - a for a, b in itertools.pairwise(distances)]
    prev_hop = [None, *hops] if arrivals else [None] * len(distances)
    rows = zip(prev_hop, [*hops, None], distances, strict=True)
    for key, group in itertools.groupby(rows, key=lambda row: row[:2]):
        yield key, [distance for *_, distance in group]


def _repeat(one, state, distances: list[int]):
    """Run `one` for each distance, in a loop that is compiled once."""
    if len(distances) == 1:
        return one(state, jnp.int32(distances[0]))[0]
    return jax.lax.scan(one, state, jnp.array(distances))[0]
