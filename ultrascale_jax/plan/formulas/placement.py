"""The mesh on the nodes of a cluster: for each axis its pieces, the GPUs that share them, and what they communicate.

Devices fill the mesh with `tp` fastest and `pp` slowest (`sharding/mesh.py`), and nodes one after the other. Bytes and
ratios are those of the playbook's cheat-sheet with three changes. Sizes are the model's own instead of 16 h^2. Sums of
gradients over a step (dp, ZeRO-1) are in float32, as this trainer makes them. ZeRO communicates over fsdp, ep and cp
together (routed experts over fsdp and cp), and dp sums the shards that this leaves. The GPU's dense peak and the links'
bandwidths are those of the data sheets: a lower bound for both sides, without latencies.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ultrascale_jax.config import AXES, Experts, MeshConfig
from ultrascale_jax.plan.formulas.costs import ring_bytes
from ultrascale_jax.plan.formulas.framework import kept_names
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.workload import Group, Run, group

ZERO_AXES = ("fsdp", "ep", "cp")
"""Axes over which ZeRO splits parameters; `ep` splits routed experts already."""

SPLITS = {
    "pp": "layers",
    "dp": "batch",
    "fsdp": "batch",
    "ep": "experts, batch",
    "cp": "sequence",
    "sp": "matrices, residual stream",
    "tp": "matrices",
}
"""Axis to what it splits; `_splits` adds the ZeRO stage."""

SENDS = {
    "pp": "hidden states to the next stage",
    "dp": "gradients, once a step",
    "fsdp": "gradients and parameters",
    "ep": "tokens to their experts",
    "cp": "keys and values",
    "sp": "activations, in every layer",
    "tp": "activations, in every layer",
}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One axis of a mesh on a cluster."""

    axis: str
    size: int
    splits: str
    sends: str
    group: tuple[int, ...]
    """GPU 0 and those that it exchanges with: along the axis, and for ZeRO's shards along ep and cp too."""
    nodes: int
    """Nodes that a group spans."""
    gb_per_second: float
    """1e9 bytes a second of one GPU along the axis."""
    sent_bytes: float | None
    """Bytes that one GPU sends in a step; none where those of another axis include them."""
    ratio: float | None
    """Communication over the computation that it can hide behind."""
    pieces: tuple[int, ...]
    """Number of the piece that each GPU holds."""


class Communication(NamedTuple):
    """Communication along one axis in a step."""

    axes: tuple[str, ...]
    """Axes of the mesh, larger than 1, over which the collectives run: for ZeRO those of `ZERO_AXES`."""
    sent_bytes: float
    """Bytes that one GPU sends in a step."""
    ratio: float
    """Time of the communication of one micro-batch, and for dp and ZeRO-1 of the step, over that of the computation."""


class Sent(NamedTuple):
    """Bytes and operations of a micro-batch along one axis."""

    size: float
    """Bytes of one GPU, or of one parameter."""
    times: float
    """How many times as many it sends in a step."""
    flops: float
    """Operations behind which that can hide."""


def place(run: Run, cluster: Cluster) -> list[Placement]:
    """Return the axes of `run` that are larger than 1, from the slowest link to the fastest."""
    found = communication(run, cluster)
    placements = []
    for axis, size in run.mesh.sizes.items():
        if size == 1 and axis not in found:
            continue
        axes, sent_bytes, ratio = found.get(axis, ((axis,), None, None))
        ranks = group(run.mesh, axes, cluster.gpus_per_node)
        placements.append(
            Placement(
                axis=axis,
                size=size,
                splits=_splits(run, axis, axes),
                sends=SENDS[axis],
                group=_members(run.mesh, axes),
                nodes=ranks.nodes,
                gb_per_second=bandwidth(axis, ranks, cluster) / 1e9,
                sent_bytes=sent_bytes,
                ratio=ratio,
                pieces=tuple(gpu // _stride(run.mesh, axis) % size for gpu in range(run.num_gpus)),
            )
        )
    return placements


def communication(run: Run, cluster: Cluster) -> dict[str, Communication]:
    """Return what each axis sends that the run uses."""
    mesh, peak = run.mesh, cluster.gpu.peak_flops("bf16")
    sent = {axis: _tensor(run, axis) for axis in ("sp", "tp")}
    sent |= {"pp": _pipeline(run), "cp": _context(run)}
    if run.shape.experts is not None:
        sent["ep"] = _experts(run, run.shape.experts)
    found = _gradients(run, cluster)
    for axis, (size, times, flops) in sent.items():
        if mesh.sizes[axis] > 1:
            rate = bandwidth(axis, group(mesh, (axis,), cluster.gpus_per_node), cluster)
            found[axis] = Communication((axis,), size * times, size / rate / (flops / peak))
    return found


def bandwidth(axis: str, ranks: Group, cluster: Cluster) -> float:
    """Return the bytes a second of one GPU along an axis.

    `pp` and `cp` send to a neighbour and `ep` from everyone to everyone, each GPU by its own card; the other axes are
    rings, which over nodes use a network card for each of their ranks in a node.
    """
    if ranks.nodes == 1:
        return 1e9 * cluster.intra_gbs
    if axis in ("pp", "cp", "ep"):
        return 1e9 * cluster.inter_gbs
    return 1e9 * min(cluster.intra_gbs, cluster.inter_gbs * ranks.per_node)


def _gradients(run: Run, cluster: Cluster) -> dict[str, Communication]:
    """Compare gradients, and with ZeRO-3 parameters, with the passes of a micro-batch.

    A sum over a step is of float32: 4 bytes of a parameter scattered, 4 gathered by dp and 2 by ZeRO-1. ZeRO-2 and
    ZeRO-3 scatter and gather bfloat16, ZeRO-2 the parameters once a step.
    """
    mesh, zero, m = run.mesh, run.zero, run.microbatches
    backward = 4 * run.tokens * (run.shape.active_params / (mesh.tensor * mesh.pp))
    # Over which axes, the axes that split the parameters, and the bytes of one of them.
    ways: dict[str, tuple[Sequence[str], Sequence[str], Sent]] = {
        "dp": (("dp",), ZERO_AXES, Sent(8, 1, backward)),
        "fsdp": (ZERO_AXES, (), Sent(6, 1, backward)),
    }
    if zero == 0:
        ways = {"dp": (("dp", *ZERO_AXES), (), Sent(8, 1, backward))}
    elif zero == 2:
        ways["fsdp"] = (ZERO_AXES, (), Sent(2, m + 1, backward))
    elif zero == 3:
        ways["fsdp"] = (ZERO_AXES, (), Sent(6, m, 1.5 * backward))
    found = {}
    for axis, (axes, split, (width, times, flops)) in ways.items():
        if over := tuple(name for name in axes if mesh.sizes[name] > 1):
            size = seconds = 0.0
            for count, ranks in _parameters(run, axes, split, cluster.gpus_per_node):
                sent = ring_bytes("all-gather", width * count, ranks.ranks)
                size += sent
                seconds += sent / bandwidth(axis, ranks, cluster)
            computed = flops / cluster.gpu.peak_flops("bf16")
            found[axis] = Communication(over, size * times, seconds / computed)
    return found


def _parameters(
    run: Run, axes: Sequence[str], split: Sequence[str], gpus_per_node: int
) -> list[tuple[float, Group]]:
    """Return parameters of one GPU, split over the axes `split`, with the GPUs along `axes` that share them.

    First the parameters that all tokens meet, then those of routed experts, which `ep` splits already.
    """
    mesh, parts = run.mesh, run.mesh.tensor * run.mesh.pp
    routed = run.shape.routed_params / parts
    groups = []
    for count, without in (
        (run.shape.num_params / parts - routed, ()),
        (routed / mesh.ep, ("ep",)),
    ):
        shards = math.prod(mesh.sizes[axis] for axis in split if axis not in without)
        along = tuple(axis for axis in axes if axis not in without)
        groups.append((count / shards, group(mesh, along, gpus_per_node)))
    return groups


def _tensor(run: Run, axis: str) -> Sent:
    """Compare four collectives of the hidden states in the forward pass of a layer with its products.

    The backward pass has as many. Where it computes again, it also repeats the gathers of both inputs (`sp`), and the
    collective behind attention if its result is not kept.
    """
    mesh, shape = run.mesh, run.shape
    layer = shape.attention_params + shape.mlp_params
    repeated = 0.0
    for alike, count in run.by_policy:
        result = "attn_out" not in kept_names(alike.policy)
        inputs = 2 * (alike.policy != "none")
        repeated += count * (inputs + result if axis == "sp" else 2 * result)
    repeated /= sum(count for _, count in run.by_policy)
    one = ring_bytes("all-gather", 2 * run.tokens * shape.d_model, mesh.sizes[axis])
    times = (8 + repeated) / 4 * (shape.layers / mesh.pp * run.microbatches)
    return Sent(4 * one, times, 2 * run.tokens * layer / mesh.tensor)


def _context(run: Run) -> Sent:
    """Compare a neighbour's keys and values with attention's forward pass.

    The backward pass moves three times as many bytes: keys and values in bfloat16, their gradients in float32.
    """
    n, shape = run.mesh.cp, run.shape
    tokens = run.sequences * run.seq_len / n
    heads = shape.head_dim / run.mesh.tensor
    step = 4 * tokens * shape.num_kv_heads * heads
    scores = 2 * tokens * run.seq_len / n * shape.num_heads * heads
    times = 4 * (shape.layers / run.mesh.pp) * run.microbatches
    return Sent((n - 1) * step, times, (n - 1) * scores)


def _pipeline(run: Run) -> Sent:
    """Compare a micro-batch's hidden states with the next stage's forward pass."""
    shape, mesh = run.shape, run.mesh
    layer = (shape.attention_params + shape.mlp_params) / mesh.tensor
    size = 2 * run.tokens * shape.d_model / mesh.sp
    flops = 2 * run.tokens * (shape.num_layers / mesh.pp) * layer
    return Sent(size, 2 * run.microbatches, flops)


def _experts(run: Run, experts: Experts) -> Sent:
    """Compare every token's copies to their experts and back with those experts."""
    shape, mesh = run.shape, run.mesh
    copies = run.tokens * experts.top_k
    there = ring_bytes("all-to-all", 2 * copies * shape.d_model / mesh.sp, mesh.ep)
    times = 2 * run.microbatches * shape.moe_layers / mesh.pp
    return Sent(2 * there, times, 2 * copies * shape.expert_params / mesh.tensor)


def _stride(mesh: MeshConfig, axis: str) -> int:
    """Return by how much the number of a GPU grows from one place on `axis` to the next."""
    return math.prod(mesh.sizes[later] for later in AXES[AXES.index(axis) + 1 :])


def _members(mesh: MeshConfig, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return GPU 0 and all GPUs whose places differ from its own along `axes` alone."""
    steps = [range(0, mesh.sizes[axis] * _stride(mesh, axis), _stride(mesh, axis)) for axis in axes]
    return tuple(sum(places) for places in itertools.product(*steps))


def _splits(run: Run, axis: str, axes: tuple[str, ...]) -> str:
    """Say what the axis splits in this run, and over which axes its collectives run where these are several."""
    if axis == "ep" and run.shape.experts is None:
        return "batch"
    if axis != "fsdp" or not run.zero:
        return SPLITS[axis]
    batch = "batch, " if run.mesh.fsdp > 1 else ""
    over = "" if axes == ("fsdp",) else f" over {'*'.join(axes)}"
    return f"{batch}state by ZeRO-{run.zero}{over}"
