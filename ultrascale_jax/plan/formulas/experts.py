"""Costs of dispatching tokens to experts: rows of buffers and of products, bytes on the links; no JAX.

`parallel/experts/exchange.py` has the program and `parallel/experts/capacity.py` its buffers. Routing is taken to be
balanced, so that no buffer is too small and there is no further round.
"""

import dataclasses
import math

from ultrascale_jax.parallel.experts import capacity
from ultrascale_jax.parallel.experts.capacity import A2AStage
from ultrascale_jax.plan.formulas import costs
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.workload import Group, Run, group, of_tokens


def num_chunks(run: Run) -> int:
    """Return parts of a GPU's tokens that are sent one after the other."""
    return 2 if run.moe.overlap and run.expert_mesh.ep > 1 else 1


def tokens(run: Run) -> int:
    """Count the tokens that a GPU sends at a time: the tokens of its part of the residual stream, or half of them."""
    return run.tokens // run.mesh.sp // num_chunks(run)


@of_tokens
def a2a_stages(run: Run) -> list[A2AStage]:
    """Return the exchanges on the way of those tokens to their experts; back they go likewise."""
    experts = run.shape.experts
    if experts is None:
        return []
    return capacity.a2a_stages(run.moe, experts, run.expert_mesh.ep, tokens(run))


@of_tokens
def received_rows(run: Run) -> int:
    """Count the rows that a GPU gets for these tokens of all: its own without ep, and the sequence group's if sp splits
    experts."""
    rows = [hop.parts * hop.rows for hop in a2a_stages(run)]
    return (rows[-1] if rows else tokens(run)) * run.expert_mesh.sp


def balanced_rows(run: Run) -> float:
    """Count the rows of one expert of those tokens if all experts have the same."""
    experts = run.shape.experts
    assert experts is not None
    mesh = run.expert_mesh
    return tokens(run) * mesh.sp * experts.top_k * mesh.ep / experts.num


@of_tokens
def expert_capacity(run: Run) -> int:
    """Count the rows for which one expert has room: the balanced ones, and the rows that chance may add.

    With the kernel at most its part of all choices, which is exactly that without ep: nothing is padded there.
    """
    assert run.shape.experts is not None
    factor = capacity.expert_capacity_factor(run.moe, run.shape.experts, run.expert_mesh.ep)
    rows = capacity.capacity(received_rows(run), balanced_rows(run), factor)
    return min(rows, math.ceil(_most_rows(run))) if ragged(run) else rows


def ragged(run: Run) -> bool:
    """Return whether the kernel multiplies the rows of all experts together."""
    return run.kernels.grouped_matmul == "mosaic"


def _most_rows(run: Run) -> float:
    """Count the rows of one expert where all tokens choose it, or with the kernel its part of all choices."""
    experts = run.shape.experts
    assert experts is not None
    chosen = experts.top_k * run.expert_mesh.ep / experts.num if ragged(run) else 1
    return received_rows(run) * chosen


def gemm_rows(run: Run) -> int:
    """Count the rows of one expert in the products of those tokens: padded to its room, but by the kernel."""
    return math.ceil(balanced_rows(run)) if ragged(run) else expert_capacity(run)


@of_tokens
def a2a_rows(run: Run) -> int:
    """Count the rows that a GPU gets of all its tokens, in all exchanges together."""
    return num_chunks(run) * sum(hop.parts * hop.rows for hop in a2a_stages(run))


def exchange_loops(run: Run) -> int:
    """Count the loops for further rounds of an exchange, one inside the other: none where all tokens have room."""
    rows, count = tokens(run), 0
    for hop in a2a_stages(run):
        count += hop.rows < rows
        rows = hop.parts * hop.rows
    return count


@of_tokens
def round_loops(run: Run) -> int:
    """Count all loops for further rounds: the loops of the exchanges, and the loop over an expert's rows inside."""
    if run.shape.experts is None:
        return 0
    return exchange_loops(run) + (expert_capacity(run) < _most_rows(run))


@of_tokens
def expert_values(run: Run) -> tuple[float, float]:
    """Count the values of a GPU's experts' rows, padding included: as the residual stream has them, and as gate."""
    shape, mesh = run.shape, run.expert_mesh
    if shape.experts is None:
        return 0.0, 0.0
    count = num_chunks(run) * expert_capacity(run) * shape.experts.num / mesh.ep
    return count * shape.d_model, count * shape.expert_d_ff / mesh.tensor


def traffic_bytes(run: Run) -> float:
    """Count the bytes of memory traffic of one layer's routed experts without their products, forward and backward.

    With full recomputation: so many passes over the rows as they come and by expert, over gate, and over the matrices,
    which are cast and cut out of their stack. Each loop for further rounds of an exchange begins with zeros, which are
    added: gradients of the matrices, and of an exchange inside another rows and their gradients. Read off XLA's
    programs of DeepSeek-V3, of which it counts nine tenths.
    """
    shape, mesh = run.shape, run.mesh
    if shape.experts is None:
        return 0.0
    (by_expert, gate), depth = expert_values(run), exchange_loops(run)
    came = a2a_rows(run) or tokens(run)
    again = a2a_rows(run) - num_chunks(run) * received_rows(run) if depth > 1 else 0
    matrices = shape.experts.num * shape.expert_params / (mesh.ep * mesh.tensor)
    parts = mesh.fsdp * mesh.cp if run.zero == 3 else 1
    passes = 5 * by_expert + 11 * gate + (11 * came + 5 * again) * shape.d_model
    return 2 * (passes + (2.3 * depth + 9 / parts) * matrices)


def stage_groups(run: Run, gpus_per_node: int) -> list[tuple[A2AStage, Group]]:
    """Return the exchanges, and the ranks of each: one of each part of ep, then the ranks of a part."""
    mesh, nodes, experts = run.expert_mesh, run.moe.a2a_groups, run.shape.experts
    if experts is None:
        return []
    far = dataclasses.replace(mesh, ep=nodes, cp=mesh.cp * mesh.ep // nodes)
    near = dataclasses.replace(mesh, ep=mesh.ep // nodes, fsdp=mesh.fsdp * nodes)
    return [
        (hop, group(far if hop.experts * nodes == experts.num else near, ("ep",), gpus_per_node))
        for hop in a2a_stages(run)
    ]


def dispatch_seconds(run: Run, cluster: Cluster) -> float:
    """Time one way of a GPU's tokens, in bfloat16, to the experts or back, and over the sequence group."""

    def seconds(kind: str, count: int, ranks: Group) -> float:
        return costs.collective_seconds(cluster, kind, 2 * run.shape.d_model * count, ranks)

    over_sequence = group(run.expert_mesh, ("sp",), cluster.gpus_per_node)
    total = seconds("all-gather", received_rows(run), over_sequence)
    for hop, ranks in stage_groups(run, cluster.gpus_per_node):
        total += seconds("all-to-all", hop.parts * hop.rows, ranks)
    return num_chunks(run) * total
