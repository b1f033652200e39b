"""Costs of splitting a sequence over cp, without the blocks of its attention; no JAX.

`parallel/context/ring.py` has the program: before and after the ring the ranks of one place exchange heads for
sequence; on it a block is computed for each distance while the next keys are sent, backward also the float32 sums of
their gradients. The bytes that its copies move, and those in memory at once, were read off XLA's programs
(`docs/planning/context.csv`).
"""

import dataclasses

from ultrascale_jax.config import kept_by_name
from ultrascale_jax.parallel.context import document_loops
from ultrascale_jax.plan.formulas import costs
from ultrascale_jax.plan.hardware import Cluster, Gpu
from ultrascale_jax.plan.workload import Group, Run, group

HALVES_BYTES, WHOLE_BYTES = 29, 18
"""Memory traffic of one step for each value of the queries, forward or backward, where it has two half blocks, or one
whole: XLA's fusions that pick a block's chunks, turn its result to float32 and add it to the sum."""

EXCHANGED_BYTES = 8
"""The same of one exchange of heads: copies to and from the order that it needs."""


def loop_trips(run: Run, scope: str) -> int | None:
    """Return the iterations of a loop over documents on a ring, by its scope; None for any other loop."""
    places = run.ring[0]
    of_ring = places, run.context.chunks, run.seq_len // places
    return document_loops.loop_trips(scope, *of_ring, run.document_tokens)


def query_key_values(run: Run) -> tuple[float, float]:
    """Count the values of a rank's queries and of its keys in the ring: ranks may share too few kv heads."""
    shape, tensor, exchanging = run.shape, run.mesh.tensor, run.ring[1]
    kv_heads = max(shape.num_kv_heads // tensor, 1)
    kv_heads *= max(1, exchanging // kv_heads)
    one = run.tokens * shape.head_dim
    return one * shape.num_heads / tensor, one * kv_heads


def ring_groups(run: Run, gpus_per_node: int) -> tuple[Group, Group]:
    """Return the ranks of one place of the ring, which are neighbours, and the ring."""
    (places, exchanging), mesh = run.ring, run.mesh
    near = dataclasses.replace(mesh, cp=exchanging, ep=mesh.ep * places)
    ring = dataclasses.replace(mesh, cp=places, tp=mesh.tp * exchanging)
    return group(near, ("cp",), gpus_per_node), group(ring, ("cp",), gpus_per_node)


def block_share(run: Run) -> float:
    """Return the ratio of one step's scores to a full shard's: two half blocks, or in natural order one full block."""
    return 1.0 if run.context.strategy == "ring" else 0.5


def mean_steps(run: Run) -> float:
    """Count the blocks of others' keys that a place of the ring attends to in a mean layer."""
    windowed = run.shape.window_share
    return (1 - windowed) * run.steps(None) + windowed * run.steps(run.shape.sliding_window)


def repeated_forward_bytes(run: Run, width: int) -> float:
    """Count the bytes that a ring's repeated forward pass leaves to the backward pass of the same layer.

    XLA finds that both pick the same chunks of the queries, and send the same keys first.
    """
    kept = run.policy in ("none", "selective") or "attn_core" in kept_by_name(run.policy)
    if kept or not run.steps(run.shape.widest_window):
        return 0.0
    query, key = query_key_values(run)
    keys = run.ring[0] if run.context.strategy == "allgather" else 2
    return width * ((0 if run.context.strategy == "ring" else 3) * query + 2 * keys * key)


def backward_bytes(run: Run, width: int) -> float:
    """Count the bytes that a step of a ring's backward pass holds in addition to the layer's queries and result.

    Chunks of queries, results and gradients, and float32 sums of the queries' gradients; keys, and float32 sums of
    theirs: here, on their way, and as they arrive, or of all places.
    """
    if not run.steps(run.shape.widest_window):
        return 0.0
    query, key = query_key_values(run)
    keys = run.ring[0] if run.context.strategy == "allgather" else 2.5
    return width * 10 * query + (2 * width + 8) * keys * key


def merge_seconds(run: Run, gpu: Gpu) -> float:
    """Time one pass through a layer's attention over cp, forward or backward, without blocks and waiting."""
    if run.mesh.cp == 1:
        return 0.0
    steps, query = mean_steps(run), query_key_values(run)[0]
    moved = steps * (WHOLE_BYTES if run.context.strategy == "ring" else HALVES_BYTES)
    if run.attends_by_document:
        piece = run.seq_len // run.ring[0]
        chunk = document_loops.chunk_lengths(run.context.chunks, piece)[0]
        moved *= document_loops.shared_tokens(chunk, run.document_length) / chunk
    moved += EXCHANGED_BYTES * (run.ring[1] > 1)
    return 2 * steps * costs.LAUNCH_S + costs.memory_seconds(gpu, moved * query)


def exposed_seconds(
    run: Run, cluster: Cluster, forward: float, backward: float
) -> tuple[float, float]:
    """Time how long a layer waits for cp, forward and backward, if all its blocks together take that long.

    A hop is hidden by a block. Gathering keys is overlapped with the own block; nothing hides what is scattered at the
    end, nor exchanges of heads.
    """
    steps, (query, key) = mean_steps(run), query_key_values(run)
    near, ring = ring_groups(run, cluster.gpus_per_node)

    def seconds(kind: str, size: float, ranks: Group) -> float:
        return costs.collective_seconds(cluster, kind, size, ranks)

    heads = sum(2 * seconds("all-to-all", 2 * size, near) for size in (query, key))
    block, block_backward = forward / (steps + 1), backward / (steps + 1)
    if run.context.strategy == "allgather":
        gather = max(0.0, seconds("all-gather", 4 * key * ring.ranks, ring) - block)
        scatter = seconds("reduce-scatter", 8 * key * ring.ranks, ring)
        return heads + gather, heads + gather + scatter
    hop, back = (seconds("collective-permute", size * key, ring) for size in (4, 8))
    return (
        heads + steps * max(0.0, hop - block),
        heads + steps * max(0.0, hop + back - block_backward),
    )
