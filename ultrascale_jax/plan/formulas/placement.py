"""The mesh on the nodes of a cluster: for each axis its pieces, the GPUs that share them, and the link between them.

Devices fill the mesh with `tp` fastest and `pp` slowest (`sharding/mesh.py`), and nodes one after the other.
"""

import math
from dataclasses import dataclass

from ultrascale_jax.config import AXES
from ultrascale_jax.plan.formulas.cheatsheet import bandwidth, cheat_sheet
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
    """GPU 0 and those that it exchanges with along the axis."""
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
    found = []
    for n, axis in enumerate(AXES):
        size = run.mesh.sizes[axis]
        if size == 1:
            continue
        stride, row = math.prod(run.mesh.sizes[later] for later in AXES[n + 1 :]), rows.get(axis)
        placement = Placement(
            axis=axis,
            size=size,
            splits=_splits(run, axis),
            sends=SENDS["fsdp" if axis == "ep" and run.shape.experts is None else axis],
            group=tuple(range(0, size * stride, stride)),
            nodes=group(run.mesh, (axis,), cluster.gpus_per_node).nodes,
            gbs=bandwidth(run.mesh, axis, size, cluster) / 1e9,
            volume=row.volume if row else None,
            ratio=row.ratio if row else None,
            pieces=tuple(gpu // stride % size for gpu in range(run.num_gpus)),
        )
        found.append(placement)
    return found


def _splits(run: Run, axis: str) -> str:
    """Say what the axis splits in this run."""
    if axis == "fsdp" or (axis == "ep" and run.shape.experts is None):
        return f"batch, state by ZeRO-{run.zero}" if run.zero else "batch"
    return SPLITS[axis]
