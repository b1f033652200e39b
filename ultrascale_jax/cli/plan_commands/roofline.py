"""Show what limits each operation of a layer, arithmetic or device memory: `ultrascale plan roofline`.

By formula: one micro-batch through the forward pass of a layer, and AdamW. It needs neither JAX nor a GPU.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.table import Table

from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.cli.plan_commands.words import recipe_of
from ultrascale_jax.figures.figure import number
from ultrascale_jax.figures.roofline import Roofline, Spot
from ultrascale_jax.plan.formulas.roofline import Operation, roofline
from ultrascale_jax.plan.hardware import Gpu


@dataclass(frozen=True, kw_only=True)
class Options(common.Assumptions):
    """Options of `ultrascale plan roofline`."""

    figure: Annotated[Path | None, command_line.option("FILE.png")] = None
    """Draw the roofline."""


def main(argv: list[str]) -> None:
    cfg, options, cluster = common.parse(argv, "roofline", Options, __doc__)
    with command_line.user_errors():
        cfg, why = common.choose_open(cfg, options, cluster)
        run = common.planned(cfg, options)
        common.tell(why)
        gpu, found = cluster.gpu, roofline(run, cluster)
        label = f"{recipe_of(argv)} on {gpu.name}: {run.tokens:,} tokens at once, {run.mesh.text}"
        written = []
        if options.figure is not None:
            written.append(output.write_figure(drawing(found, gpu, label), options.figure))
    if options.json:
        rows = [
            {
                "name": op.name,
                "kind": op.kind,
                "flops": op.flops,
                "bytes": op.moved,
                "intensity": op.intensity,
                "limit": op.limit(gpu),
                "bound_s": op.bound_s(gpu),
                "seconds": op.seconds,
            }
            for op in found
        ]
        machine = {"gpus": options.gpus, "gpu": gpu.name, "bytes_per_s": 1e9 * gpu.hbm_gbs}
        print(output.verb_json("roofline", {"label": run.label, **machine, "operations": rows}))
        return
    print(label)
    output.console(120).print(shown(found, gpu))
    peaks = ", ".join(
        f"{name} {peak / 1e12:,.0f} TFLOP/s from {peak / (1e9 * gpu.hbm_gbs):.0f} FLOP/byte on"
        for name, peak in roofs(found, gpu).items()
    )
    print(f"memory {gpu.hbm_gbs / 1e3:.2f} TB/s; {peaks}", *written, sep="\n")


def roofs(found: list[Operation], gpu: Gpu) -> dict[str, float]:
    """Return the peaks of the operations' number formats, by name."""
    return {op.precision: gpu.peak_flops(op.precision) for op in found}


def shown(found: list[Operation], gpu: Gpu) -> Table:
    """Return the table of the operations."""
    numbers = ("GFLOP", "MB", "FLOP/byte", "ms at the roof", "ms by formula")
    table = output.table(("operation",), numbers, ("limited by",))
    for n, op in enumerate(found, 1):
        sizes = (number(op.flops / 1e9), f"{op.moved / 1e6:,.0f}", f"{op.intensity:,.1f}")
        times = (f"{1e3 * op.bound_s(gpu):.3f}", f"{1e3 * op.seconds:.3f}")
        table.add_row(f"{n}  {op.name}", *sizes, *times, op.limit(gpu))
    return table


def drawing(found: list[Operation], gpu: Gpu, title: str) -> Roofline:
    """Return the picture; a point's height is its FLOPs over its time by formula."""
    spots = [
        Spot(name=op.name, intensity=op.intensity, speed=op.flops / op.seconds, kind=op.kind)
        for op in found
    ]
    caption = (
        "By formula: each operation's FLOPs over the bytes that it must move, and over its time."
    )
    return Roofline(
        name="roofline",
        title=f"Roofline: {title}",
        caption=caption,
        spots=spots,
        roofs=roofs(found, gpu),
        bandwidth=1e9 * gpu.hbm_gbs,
    )
