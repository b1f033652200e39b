"""Show what each axis of a mesh splits, between which GPUs of which nodes, over which link: `ultrascale plan mesh`.

It needs neither JAX nor a GPU, and answers at once. What travels is counted by the playbook's cheat-sheet.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.cli.plan_commands.words import recipe_of
from ultrascale_jax.config import require
from ultrascale_jax.figures.mesh_map import MOST_GPUS, AxisMap, MeshMap
from ultrascale_jax.plan.formulas.placement import Placement, place
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.units import GIB


@dataclass(frozen=True, kw_only=True)
class Options(common.Assumptions):
    """Options of `ultrascale plan mesh`."""

    figure: Annotated[Path | None, command_line.option("FILE.png")] = None
    """Draw the mesh on the nodes."""


def main(argv: list[str]) -> None:
    cfg, options, cluster = common.parse(argv, "mesh", Options, __doc__)
    with command_line.user_errors():
        cfg, why = common.choose_open(cfg, options, cluster)
        run = common.planned(cfg, options)
        common.tell(why)
        axes = place(run, cluster)
        label = f"{recipe_of(argv)} on {options.gpus} {cluster.gpu.name}"
        written = []
        if options.figure is not None:
            fix = f"the picture shows from 2 to {MOST_GPUS:,} GPUs"
            require(1 < options.gpus <= MOST_GPUS, "gpus", options.gpus, fix)
            title = f"{label}: {run.mesh.text}"
            written.append(output.write_figure(drawing(axes, cluster, title), options.figure))
    if options.json:
        print(output.verb_json("mesh", summarize(axes, run.label, cluster)))
        return
    print(f"{label}, {cluster.nodes} nodes of {cluster.gpus_per_node}: {run.label}")
    if axes:
        output.console(150).print(shown(axes))
    print(*written, sep="\n", end="\n" * bool(written))


def summarize(axes: list[Placement], label: str, cluster: Cluster) -> dict[str, Any]:
    """Return the fields of the JSON object; bytes of one GPU and step."""
    rows = [
        {
            "axis": a.axis,
            "size": a.size,
            "splits": a.splits,
            "sends": a.sends,
            "group": a.group,
            "nodes": a.nodes,
            "gbs": a.gbs,
            "bytes": a.volume,
            "ratio": a.ratio,
        }
        for a in axes
    ]
    about = {"label": label, "gpus": cluster.num_gpus, "gpu": cluster.gpu.name}
    return about | {"nodes": cluster.nodes, "gpus_per_node": cluster.gpus_per_node, "axes": rows}


def shown(axes: list[Placement]) -> Table:
    """Return the table of the axes."""
    words = ("axis", "size", "splits", "group of GPU 0", "link")
    table = output.table(words, ("GB/s", "GiB a step", "comm. / comp."))
    for a in axes:
        first, second, *more = map(str, a.group)
        members = [first, second, "...", more[-1]] if len(more) > 1 else a.group
        volume = "" if a.volume is None else f"{a.volume / GIB:,.1f}"
        ratio = "" if a.ratio is None else f"{a.ratio:.2f}"
        group = ", ".join(map(str, members))
        table.add_row(a.axis, str(a.size), a.splits, group, link(a), f"{a.gbs:g}", volume, ratio)
    return table


def link(a: Placement) -> str:
    """Say over which link the groups of an axis talk."""
    return "in the node" if a.nodes == 1 else f"over {a.nodes} nodes"


def drawing(axes: list[Placement], cluster: Cluster, title: str) -> MeshMap:
    """Return the picture of the axes."""
    maps = [
        AxisMap(
            title=f"{a.axis} {a.size}: {a.splits.split(',')[0]}\n{link(a)}, {a.gbs:g} GB/s",
            pieces=a.pieces,
            group=a.group,
        )
        for a in axes
    ]
    caption = "A square is a GPU, a column a node; the number is the piece of what the axis splits."
    return MeshMap(
        name="mesh", title=title, caption=caption, axes=maps, per_node=cluster.gpus_per_node
    )
