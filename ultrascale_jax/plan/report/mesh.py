"""Show what each axis of a mesh splits, between which GPUs of which nodes, over which link: `--explain mesh`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table

from ultrascale_jax.config import require
from ultrascale_jax.figures.mesh_map import MOST_GPUS, AxisMap, MeshMap
from ultrascale_jax.plan.formulas.placement import Placement, place
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.report.layout import line, table
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.units import GIB, counted


@dataclass(frozen=True, kw_only=True)
class MeshReport:
    """The axes of a run's mesh on a cluster."""

    run: Run
    cluster: Cluster
    axes: list[Placement]
    """Axes larger than 1, from the slowest link to the fastest."""

    @classmethod
    def of(cls, run: Run, cluster: Cluster) -> "MeshReport":
        """Place the mesh of `run` on `cluster`."""
        return cls(run=run, cluster=cluster, axes=place(run, cluster))

    def __rich__(self) -> Group:
        count = self.cluster.nodes
        nodes = f"{counted(count, 'node')} of {self.cluster.gpus_per_node}"
        return Group(line(f"mesh {self.run.mesh.text} on {nodes}"), *self._tables())

    @property
    def rows(self) -> list[dict[str, str]]:
        """A row for each axis: texts by column, of which the first five are texts and the others numbers."""
        return [
            {
                "axis": a.axis,
                "size": str(a.size),
                "splits": a.splits,
                "group of GPU 0": members(a.group),
                "link": link(a),
                "GB/s": f"{a.gb_per_second:g}",
                "GiB a step": "" if a.sent_bytes is None else f"{a.sent_bytes / GIB:,.1f}",
                "comm. / comp.": "" if a.ratio is None else f"{a.ratio:.2f}",
            }
            for a in self.axes
        ]

    def _tables(self) -> list[Table]:
        rows = self.rows
        if not rows:
            return []
        columns = [*rows[0]]
        made = table(columns[:5], columns[5:])
        for row in rows:
            made.add_row(*row.values())
        return [made]

    def asdict(self) -> dict[str, Any]:
        """Return the fields of the JSON object; bytes of one GPU and step."""
        rows = [{k: v for k, v in vars(a).items() if k != "pieces"} for a in self.axes]
        cluster = {"nodes": self.cluster.nodes, "gpus_per_node": self.cluster.gpus_per_node}
        return cluster | {"axes": rows}

    def figure(self) -> MeshMap:
        """Draw the shards of each axis on the nodes. Raises `UserError` for more GPUs than a picture can show."""
        gpus = self.cluster.num_gpus
        fix = f"the picture shows from 2 to {MOST_GPUS:,} GPUs"
        require(1 < gpus <= MOST_GPUS, "gpus", gpus, fix)
        maps = [
            AxisMap(
                title=f"{a.axis} {a.size}: {a.splits.split(',')[0]}\n{link(a)}, {a.gb_per_second:g} GB/s",
                pieces=a.pieces,
                group=a.group,
            )
            for a in self.axes
        ]
        return MeshMap(
            name="mesh",
            title=f"{self.run.mesh.text} on {gpus} {self.cluster.gpu.name}",
            caption="A square is a GPU, a column a node; the number is the piece of what the axis splits.",
            axes=maps,
            per_node=self.cluster.gpus_per_node,
        )


def link(a: Placement) -> str:
    """Say over which link the groups of an axis talk."""
    return "in the node" if a.nodes == 1 else f"over {a.nodes} nodes"


def members(group: Sequence[int]) -> str:
    """Write a group of two GPUs or more, the middle of a large one left out."""
    first, second, *middle = map(str, group)
    return ", ".join([first, second, "...", middle[-1]] if middle[1:] else [first, second, *middle])
