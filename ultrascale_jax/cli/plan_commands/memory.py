"""Predict the memory of one GPU by formulas, part by part and through a step: `ultrascale plan memory`.

It needs neither JAX nor a GPU, and answers at once.
"""

import contextlib
import warnings
from typing import Any

from rich.console import Console
from rich.table import Table

from ultrascale_jax import units
from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.config import AUTO, Config, UserError, with_changes
from ultrascale_jax.plan.auto import choose_auto
from ultrascale_jax.plan.formulas import memory, pipeline
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.workload import Run


def main(argv: list[str]) -> None:
    cfg, options, cluster = common.parse(argv, "memory", common.Assumptions, __doc__)
    with command_line.user_errors():
        cfg, why = common.choose_open(cfg, options, cluster)
        with output.working("looking for options that fit"):
            summary = summarize(cfg, options, cluster)
        common.tell(why)
    if options.json:
        print(output.verb_json("memory", summary))
        return
    console = Console()
    about = f"{summary['gpus']} x {summary['gpu']}: {summary['label']}"
    console.print(about, _parts(summary), _timeline(summary), sep="\n", soft_wrap=True)
    if summary["in_flight"] > 1:
        count = f"{summary['in_flight']:g} micro-batches"
        console.print(f"the fullest rank of the pipeline keeps the activations of {count}")
    console.print(_verdict(summary), soft_wrap=True)


def summarize(
    cfg: Config, options: common.Assumptions, cluster: Cluster, *, meshes: bool = True
) -> dict[str, Any]:
    """Return one GPU's bytes by part and by moment, whether they fit, and a hint, of other `meshes` too if it must.

    Raises `UserError` for an illegal run.
    """
    run = common.planned(cfg, options)
    usable, held = cluster.gpu.usable_bytes, memory.breakdown(run)
    moved, host = memory.host_bytes(run), cluster.gpu.usable_host_bytes
    fits = held.peak_bytes <= usable and moved <= host
    hint, hint_bytes = _hint(cfg, options, cluster, fits=fits, meshes=meshes)
    return {
        "label": run.label,
        "gpus": options.gpus,
        "gpu": cluster.gpu.name,
        "parts": held.parts,
        "timeline": memory.timeline(run),
        "in_flight": _in_flight(run),
        "peak_bytes": held.peak_bytes,
        "usable_bytes": usable,
        "host_bytes": moved,
        "usable_host_bytes": host,
        "fits": fits,
        "hint": hint,
        "hint_bytes": hint_bytes,
    }


def _in_flight(run: Run) -> float:
    """Return the micro-batches whose activations the fullest rank of a pipeline holds at once."""
    if run.mesh.pp == 1:
        return 1
    return pipeline.counts(run).peaks["in_flight"] / run.virtual_stages


def _hint(
    cfg: Config,
    options: common.Assumptions,
    cluster: Cluster,
    *,
    fits: bool,
    meshes: bool,
) -> tuple[str, int]:
    """Find the options of a faster run that fits, or of any, and its bytes; ("", 0) without one.

    Recomputation and micro-batches are chosen as `auto` chooses them; if nothing fits, with ZeRO-3, then with one of
    other `meshes`.
    """
    own = with_changes(cfg, mesh=cfg.mesh, remat="auto", microbatches=AUTO)
    sharded = with_changes(own, mesh=cfg.mesh, zero=3)
    shape = common.shape_of(cfg, options)
    tries = [(own, False)] if fits else [(own, False), (sharded, False), (sharded, True)]
    tries = [(tried, other) for tried, other in tries if meshes or not other]
    for tried, choose_mesh in tries:
        with warnings.catch_warnings(), contextlib.suppress(UserError):
            warnings.simplefilter("ignore")
            found, _ = choose_auto(tried, cluster, choose_mesh=choose_mesh, shape=shape)
            peak = memory.breakdown(common.planned(found, options)).peak_bytes
            if peak <= cluster.gpu.usable_bytes:
                mesh = [] if found.mesh == cfg.mesh else ["--mesh", found.mesh.text]
                return " ".join(mesh + command_line.changes("train", cfg.train, found.train)), peak
    return "", 0


def _parts(summary: dict[str, Any]) -> Table:
    unit, count = units.byte_unit(summary["peak_bytes"])
    table = Table("part of the peak", unit, "share")
    for name, size in summary["parts"].items():
        if size:
            table.add_row(name, f"{size / count:.2f}", f"{size / summary['peak_bytes']:.0%}")
    table.add_section()
    table.add_row("together", f"{summary['peak_bytes'] / count:.2f}", "100%")
    table.add_row(f"usable of {summary['gpu']}", f"{summary['usable_bytes'] / count:.2f}", "")
    if moved := summary["host_bytes"]:
        table.add_section()
        table.add_row("activations in the host's memory", f"{moved / count:.2f}", "")
        table.add_row("usable of the host", f"{summary['usable_host_bytes'] / count:.2f}", "")
    return table


def _timeline(summary: dict[str, Any]) -> Table:
    unit, count = units.byte_unit(summary["peak_bytes"])
    table = Table("moment", unit)
    for name, size in summary["timeline"]:
        table.add_row(name, f"{size / count:.2f}")
    return table


def _verdict(summary: dict[str, Any]) -> str:
    space = summary["usable_bytes"] - summary["peak_bytes"]
    host = summary["usable_host_bytes"] - summary["host_bytes"]
    hint = f"{summary['hint']} ({units.size(summary['hint_bytes'])})"
    if summary["fits"]:
        more = f"; there is room for {hint}" if summary["hint"] else ""
        return f"fits, {units.size(space)} left{more}"
    nothing = "no mesh, micro-batch, ZeRO stage or recomputation is enough"
    short = [f"{units.size(-space)} short"] if space < 0 else []
    short += [f"{units.size(-host)} of the host's memory short"] if host < 0 else []
    return f"does not fit, {' and '.join(short)}; {f'try {hint}' if summary['hint'] else nothing}"
