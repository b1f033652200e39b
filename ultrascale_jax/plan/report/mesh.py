"""Show what each axis of a mesh splits, between which GPUs of which nodes, over which link: `--explain mesh`."""

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

    def _tables(self) -> list[Table]:
        if not self.axes:
            return []
        words = ("axis", "size", "splits", "group of GPU 0", "link")
        made = table(words, ("GB/s", "GiB a step", "comm. / comp."))
        for a in self.axes:
            first, second, *others = map(str, a.group)
            members = [first, second, "...", others[-1]] if len(others) > 1 else map(str, a.group)
            sent = "" if a.sent_bytes is None else f"{a.sent_bytes / GIB:,.1f}"
            ratio = "" if a.ratio is None else f"{a.ratio:.2f}"
            words = (a.axis, str(a.size), a.splits, ", ".join(members), link(a))
            made.add_row(*words, f"{a.gb_per_second:g}", sent, ratio)
        return [made]

    def asdict(self) -> dict[str, Any]:
        """Return the fields of the JSON object; bytes of one GPU and step."""
        rows = [{k: v for k, v in vars(a).items() if k != "pieces"} for a in self.axes]
        cluster = {"nodes": self.cluster.nodes, "gpus_per_node": self.cluster.gpus_per_node}
        return cluster | {"axes": rows}

    def figure(self) -> MeshMap:
        """Draw the pieces of each axis on the nodes. Raises `UserError` for more GPUs than a picture can show."""
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
