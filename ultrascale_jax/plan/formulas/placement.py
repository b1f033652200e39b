"""The mesh on the nodes of a cluster: for each axis its shards, the GPUs that share them, and their communication.

Devices fill the mesh with `tp` fastest and `pp` slowest (`sharding/mesh.py`), and nodes one after the other. Bytes and
ratios follow the playbook's cheat-sheet with three changes. Sizes are the model's own instead of 16 h^2. Sums of
gradients over a step (dp, ZeRO-1) are in float32, as in this trainer. ZeRO communicates over fsdp, ep and cp
together (routed experts over fsdp and cp), and dp sums the shards that this leaves. The GPU's dense peak and the links'
bandwidths come from the data sheets: a lower bound for both sides, without latencies.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ultrascale_jax.config import AXES, Experts, LayerRemat, MeshConfig
from ultrascale_jax.plan.formulas import muon, pipeline
from ultrascale_jax.plan.formulas.context import mean_steps, query_key_values
from ultrascale_jax.plan.formulas.costs import ring_bytes
from ultrascale_jax.plan.formulas.experts import a2a_stages, num_chunks, received_rows
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
"""Axis to the dims that it splits; `_splits` adds the ZeRO stage."""

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
    """GPU 0 and the GPUs that it exchanges with: along the axis, and for ZeRO's shards along ep and cp too."""
    nodes: int
    """Nodes that a group spans."""
    gb_per_second: float
    """1e9 bytes a second of one GPU along the axis."""
    sent_bytes: float | None
    """Bytes that one GPU sends in a step; none where another axis' bytes include them."""
    ratio: float | None
    """Communication over the computation that it can overlap with."""
    pieces: tuple[int, ...]
    """Number of the shard that each GPU holds."""


class Communication(NamedTuple):
    """Communication along one axis in a step."""

    axes: tuple[str, ...]
    """Axes of the mesh, larger than 1, over which the collectives run: for ZeRO `ZERO_AXES`."""
    sent_bytes: float
    """Bytes that one GPU sends in a step."""
    ratio: float
    """Time of the communication of one micro-batch, and for dp and ZeRO-1 of the step, over that of the computation."""


class Sent(NamedTuple):
    """Traffic of one GPU along one axis."""

    size: float
    """Bytes that can hide behind `flops` operations."""
    step_size: float
    """Bytes of a step."""
    flops: float


class PerParameter(NamedTuple):
    """Traffic of one GPU for each parameter or its gradient."""

    width: float
    """Bytes that can hide behind `flops` operations."""
    times: float
    """Times that it sends them in a step."""
    flops: float


def place(run: Run, cluster: Cluster) -> list[Placement]:
    """Return the axes of `run` that are larger than 1, from the slowest link to the fastest."""
    by_axis = communication(run, cluster)
    placements = []
    for axis, size in run.mesh.sizes.items():
        if size == 1 and axis not in by_axis:
            continue
        axes, sent_bytes, ratio = by_axis.get(axis, ((axis,), None, None))
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
    sent = {axis: _tensor(run, axis) for axis in ("sp", "tp") if mesh.sizes[axis] > 1}
    if mesh.pp > 1:
        sent["pp"] = _pipeline(run)
    if mesh.cp > 1:
        sent["cp"] = _context(run)
    if run.expert_mesh.ep > 1 and run.shape.experts is not None:
        sent["ep"] = _experts(run, run.shape.experts)
    by_axis = _gradients(run, cluster)
    for axis, (size, step_size, flops) in sent.items():
        axes = (axis,)
        if axis == "ep" and run.folds:
            axes = tuple(a for a in ("ep", "sp") if mesh.sizes[a] > 1)
        rate = bandwidth(axis, group(mesh, axes, cluster.gpus_per_node), cluster)
        by_axis[axis] = Communication(axes, step_size, size / rate / (flops / peak))
    for axis, size in (muon.sent_bytes(run) if run.muon else {}).items():
        by_axis[axis] = by_axis[axis]._replace(sent_bytes=by_axis[axis].sent_bytes + size)
    return by_axis


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
    ways: dict[str, tuple[Sequence[str], Sequence[str], PerParameter]] = {
        "dp": (("dp",), ZERO_AXES, PerParameter(8, 1, backward)),
        "fsdp": (ZERO_AXES, (), PerParameter(6, 1, backward)),
    }
    if zero == 0:
        ways = {"dp": (("dp", *ZERO_AXES), (), PerParameter(8, 1, backward))}
    elif zero == 2:
        ways["fsdp"] = (ZERO_AXES, (), PerParameter(2, m + 1, backward))
    elif zero == 3:
        ways["fsdp"] = (ZERO_AXES, (), PerParameter(6, m, 1.5 * backward))
    by_axis = {}
    for axis, (axes, split, (width, times, flops)) in ways.items():
        if over := tuple(name for name in axes if mesh.sizes[name] > 1):
            size = seconds = 0.0
            for count, ranks in _parameters(run, axes, split, cluster.gpus_per_node):
                sent = ring_bytes("all-gather", width * count, ranks.ranks)
                size += sent
                seconds += sent / bandwidth(axis, ranks, cluster)
            computed = flops / cluster.gpu.peak_flops("bf16")
            by_axis[axis] = Communication(over, size * times, seconds / computed)
    return by_axis


def _parameters(
    run: Run, axes: Sequence[str], split: Sequence[str], gpus_per_node: int
) -> list[tuple[float, Group]]:
    """Return parameters of one GPU, split over the axes `split`, with the GPUs along `axes` that share them.

    First the parameters that all tokens meet, then the routed experts', which `ep` splits already.
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


def _passes(run: Run) -> tuple[float, float]:
    """Count forward and backward passes of a GPU through its layers: in a pipeline's lock step one a tick, on whatever
    rank it works."""
    if run.mesh.pp == 1:
        return run.microbatches, run.microbatches
    ticks = pipeline.counts(run).ticks
    return ticks["F"] / run.virtual_stages, ticks["B"] / run.virtual_stages


def _layers(run: Run) -> float:
    """Count the layers of a GPU, a pipeline's padding included."""
    return run.shape.layers if run.mesh.pp == 1 else run.rank_layers


def _moe_layers(run: Run) -> float:
    """Count the layers of experts of a GPU."""
    return _layers(run) * run.shape.moe_layers / run.shape.layers


def _ways(run: Run) -> float:
    """Count the ways of tokens to their experts and back: there once more where a layer is computed again."""
    forward, backward = _passes(run)
    return 2 * forward + (2 + _mean(run, lambda policy: policy != "none")) * backward


def _mean(run: Run, term: Callable[[LayerRemat], float]) -> float:
    """Return the mean over the layers of a term that depends on their policy."""
    layers = sum(count for _, count in run.by_policy)
    return sum(count * term(policy_run.policy) for policy_run, count in run.by_policy) / layers


def _tensor(run: Run, axis: str) -> Sent:
    """Compare four collectives of the hidden states in the forward pass of a layer with its products.

    The backward pass has as many. Where it computes again, it also repeats the gathers of both inputs (`sp`), and the
    collective behind attention if its result is not kept.
    """

    def repeated(policy: LayerRemat) -> float:
        result = "attn_out" not in kept_names(policy)
        inputs = 2 * (policy != "none")
        return inputs + result if axis == "sp" else 2 * result

    mesh, shape, ranks = run.mesh, run.shape, run.mesh.sizes[axis]
    layer = shape.attention_params + shape.mlp_params
    one = ring_bytes("all-gather", 2 * run.tokens * shape.d_model, ranks)
    forward, backward = _passes(run)
    size = _layers(run) * one * (4 * forward + (4 + _mean(run, repeated)) * backward)
    if axis == "sp" and (mesh.ep > 1 or run.folds) and shape.experts is not None:
        # The rows that came to the experts are gathered and scattered in place of the group's own tokens, or nothing.
        rows = 0 if run.folds else num_chunks(run) * received_rows(run)
        recomputed = ring_bytes("all-gather", 2 * rows * shape.d_model, ranks) - one
        size += _moe_layers(run) * recomputed * _ways(run)
    return Sent(4 * one, size, 2 * run.tokens * layer / mesh.tensor)


def _context(run: Run) -> Sent:
    """Compare the keys and values of others, and heads exchanged for sequence, with attention's forward pass.

    The backward pass moves three times as many bytes of the ring: keys and values in bfloat16, their gradients in
    float32. Where it computes attention again, it receives the first keys once for both, or all that are gathered.
    """

    def repeated(policy: LayerRemat) -> float:
        if policy == "none":
            return 0.0
        if "attn_core" in kept_names(policy) or run.context.strategy == "allgather":
            return exchanged
        return max(0.0, steps - 1) * hop + exchanged

    if len(run.kinds) > 1:
        parts = [(_context(one), share) for one, share in run.kinds]
        return Sent(*(sum(share * sent[i] for sent, share in parts) for i in range(3)))
    n, shape = run.mesh.cp, run.shape
    query, key = query_key_values(run)
    steps, hop = mean_steps(run), 4 * key
    exchanged = ring_bytes("all-to-all", 4 * (query + key), run.ring[1])
    forward, backward = _passes(run)
    one = steps * hop + exchanged
    backward *= one + 2 * steps * hop + _mean(run, repeated)
    scores = 2 * run.tokens * run.seq_len / n * shape.num_heads * shape.head_dim / run.mesh.tensor
    return Sent(one, _layers(run) * (forward * one + backward), (n - 1) * scores)


def _pipeline(run: Run) -> Sent:
    """Compare a micro-batch's hidden states with the next stage's forward pass.

    Every tick sends them on, and gradients back. All stages hold a part of the vocabulary: the first stage's input and
    the last one's result, with the gradients of both, are summed over them.
    """
    shape, mesh = run.shape, run.mesh
    layer = (shape.attention_params + shape.mlp_params) / mesh.tensor
    size = 2 * run.tokens * shape.d_model / mesh.sp
    flops = 2 * run.tokens * (shape.num_layers / mesh.pp) * layer
    counts = pipeline.counts(run)
    ticks, times = counts.ticks, counts.times
    sent = (ticks["F"] + ticks["B"]) * size
    sent += times["embed"] * ring_bytes("all-reduce", size, mesh.pp * mesh.tp)
    sums = 2 * times["head"] + times["embed_gradient"]
    sent += sums * ring_bytes("all-reduce", size, mesh.pp)
    return Sent(size, sent, flops)


def _experts(run: Run, experts: Experts) -> Sent:
    """Compare the rows of tokens to their experts and back with those experts.

    A token goes once to each rank that has experts of its own, and rows have room for more than the mean. The backward
    pass brings the tokens once more, unless all is kept.
    """
    mesh, shape = run.mesh, run.shape
    rows = sum(ring_bytes("all-to-all", hop.parts * hop.rows, hop.parts) for hop in a2a_stages(run))
    one_way = 2 * shape.d_model * num_chunks(run) * rows
    size = _moe_layers(run) * one_way * _ways(run)
    return Sent(
        2 * one_way, size, 2 * run.tokens * experts.top_k * shape.expert_params / mesh.tensor
    )


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
