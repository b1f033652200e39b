"""The mesh on the nodes of a cluster: for each axis its pieces, the GPUs that share them, and the link between them.

Devices fill the mesh with `tp` fastest and `pp` slowest (`sharding/mesh.py`), and nodes one after the other.
"""

import itertools
import math
from dataclasses import dataclass

from ultrascale_jax.config import AXES, MeshConfig
from ultrascale_jax.plan.formulas.cheatsheet import bandwidth, cheat_sheet, ring_bandwidth
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.workload import Run, group

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
    gbs: float
    """1e9 bytes a second of one GPU along the axis."""
    volume: float | None
    """Bytes that one GPU sends in a step, by the cheat-sheet; none where it has no row for the axis."""
    ratio: float | None
    """Communication over the computation that it can hide behind, by the cheat-sheet."""
    pieces: tuple[int, ...]
    """Number of the piece that each GPU holds."""


def place(run: Run, cluster: Cluster) -> list[Placement]:
    """Return the axes of `run` that are larger than 1, from the slowest link to the fastest."""
    rows = {row.axis: row for row in cheat_sheet(run, cluster) if row.used}
    placements = []
    for axis, size in run.mesh.sizes.items():
        row = rows.get(axis)
        if size == 1 and row is None:
            continue
        axes = row.axes if row else (axis,)
        ranks = group(run.mesh, axes, cluster.gpus_per_node)
        ring = axis in ("dp", "fsdp")
        rate = ring_bandwidth(ranks, cluster) if ring else bandwidth(run.mesh, axis, size, cluster)
        placements.append(
            Placement(
                axis=axis,
                size=size,
                splits=_splits(run, axis, axes),
                sends=SENDS[axis],
                group=_members(run.mesh, axes),
                nodes=ranks.nodes,
                gbs=rate / 1e9,
                volume=row.volume if row else None,
                ratio=row.ratio if row else None,
                pieces=tuple(gpu // _stride(run.mesh, axis) % size for gpu in range(run.num_gpus)),
            )
        )
    return placements


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
