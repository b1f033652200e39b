"""What one GPU holds, part by part, from formulas, and through a step: `ultrascale plan memory`.

No JAX, no GPU: the answer is there at once.
"""

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.config import Config, UserError, require
from ultrascale_jax.plan.formulas import memory, pipeline
from ultrascale_jax.plan.hardware import Gpu
from ultrascale_jax.plan.search.search_space import with_changes
from ultrascale_jax.plan.workload import Run

LIGHTER = {"none": ("selective", "full"), "dots": ("selective", "full"), "selective": ("full",)}
"""Recomputation that keeps less than the policy, most first."""

HEAVIER = {"full": ("none", "selective"), "selective": ("none",), "dots": ("none",)}
"""Recomputation that keeps more than the policy, most first."""


SPREAD = (*(("sp", n) for n in (1, 2, 4, 8)), *(("cp", n) for n in (2, 4, 8, 16, 32, 64)))
"""Axes that may take GPUs from fsdp, and how many times as many, gentlest first."""


@dataclass(frozen=True, kw_only=True)
class Options(common.Assumptions):
    """What to count."""

    software: Annotated[str, tyro.conf.arg(metavar="NAME")] = "ultrascale"
    """Whose trainer: ultrascale; in a checkout, by `python -m scripts.plan memory`, also nanotron."""


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """How one framework uses a GPU's memory."""

    breakdown: Callable[[Run], memory.Breakdown]
    timeline: Callable[[Run], list[tuple[str, int]]]
    usable_bytes: Callable[[Gpu], int]
    in_flight: Callable[[Run], float]
    """Micro-batches whose activations the fullest rank of a pipeline holds at once."""


def _in_flight(run: Run) -> float:
    if run.mesh.pp == 1:
        return 1
    return pipeline.counts(run).peaks["in_flight"] / run.virtual_stages


MODELS = {
    "ultrascale": MemoryModel(
        breakdown=memory.breakdown,
        timeline=memory.timeline,
        usable_bytes=lambda gpu: gpu.usable_bytes,
        in_flight=_in_flight,
    )
}


def main(argv: list[str], models: Mapping[str, MemoryModel] = MODELS) -> None:
    cfg, options, cluster = common.parse(argv, "memory", Options, __doc__)
    with command_line.user_errors():
        fix = f"choose one of {', '.join(models)}"
        if "nanotron" not in models:
            fix += "; in a checkout, nanotron: python -m scripts.plan memory --software nanotron"
        require(options.software in models, "software", options.software, fix)
        cfg, why = common.chosen(cfg, options, cluster)
        summary = summarize(cfg, options, cluster.gpu, models[options.software])
        common.tell(why)
    if options.json:
        print(output.verb_json("memory", summary))
        return
    console = Console()
    about = f"{summary['gpus']} x {summary['gpu']}, {summary['software']}: {summary['label']}"
    console.print(about, _parts(summary), _timeline(summary), sep="\n", soft_wrap=True)
    if summary["in_flight"] > 1:
        count = f"{summary['in_flight']:g} micro-batches"
        console.print(f"the fullest rank of the pipeline keeps the activations of {count}")
    console.print(_verdict(summary), soft_wrap=True)


def summarize(cfg: Config, options: Options, gpu: Gpu, model: MemoryModel) -> dict[str, Any]:
    """Bytes on one GPU by part and by moment, whether they fit, and what to change; `UserError` if it cannot run."""
    run = common.planned(cfg, options)
    usable, held = model.usable_bytes(gpu), model.breakdown(run)
    fits = held.peak_bytes <= usable
    hint, hint_bytes = _hint(cfg, options, model, usable, fits=fits)
    return {
        "label": run.label,
        "software": options.software,
        "gpus": options.gpus,
        "gpu": gpu.name,
        "parts": held.parts,
        "timeline": model.timeline(run),
        "in_flight": model.in_flight(run),
        "peak_bytes": held.peak_bytes,
        "usable_bytes": usable,
        "fits": fits,
        "hint": hint,
        "hint_bytes": hint_bytes,
    }


def _hint(
    cfg: Config, options: Options, model: MemoryModel, usable: int, *, fits: bool
) -> tuple[str, int]:
    """Options, gentlest first, with which the run fits, or a faster one does, and its bytes; ("", 0) without any."""
    for changed in _faster(cfg) if fits else _smaller(cfg, options.gpus):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                peak = model.breakdown(common.planned(changed, options)).peak_bytes
            except UserError:
                continue
        if peak <= usable:
            mesh = [] if changed.mesh == cfg.mesh else ["--mesh", changed.mesh.text]
            return " ".join(mesh + command_line.changes("train", cfg.train, changed.train)), peak
    return "", 0


def _faster(cfg: Config) -> Iterator[Config]:
    for remat in HEAVIER.get(cfg.train.remat, ()):
        yield with_changes(cfg, mesh=cfg.mesh, remat=remat)
    if cfg.train.microbatches % 2 == 0:
        yield with_changes(cfg, mesh=cfg.mesh, microbatches=cfg.train.microbatches // 2)


def _smaller(cfg: Config, num_gpus: int) -> Iterator[Config]:
    """Smaller micro-batches, with those more sharding, more recomputation, and at last more of `sp` or `cp`."""
    train, mesh = cfg.train, cfg.mesh.resolve(num_gpus)
    for axis, more in SPREAD:
        if mesh.fsdp % more:
            continue
        sizes = {"fsdp": mesh.fsdp // more, axis: mesh.sizes[axis] * more}
        spread = dataclasses.replace(mesh, **sizes)
        counts = [train.microbatches * more]
        while train.global_batch % (spread.batch * 2 * counts[-1]) == 0:
            counts.append(2 * counts[-1])
        policies = (train.remat, *LIGHTER.get(train.remat, ()))
        for remat, zero, count in itertools.product(policies, range(train.zero, 4), counts):
            chosen = spread if more > 1 else cfg.mesh
            yield with_changes(cfg, mesh=chosen, microbatches=count, zero=zero, remat=remat)


def _parts(summary: dict[str, Any]) -> Table:
    unit, count = common.unit_of(summary["peak_bytes"])
    table = Table("part of the peak", unit, "share")
    for name, size in summary["parts"].items():
        if size:
            table.add_row(name, f"{size / count:.2f}", f"{size / summary['peak_bytes']:.0%}")
    table.add_section()
    table.add_row("together", f"{summary['peak_bytes'] / count:.2f}", "100%")
    table.add_row(f"usable of {summary['gpu']}", f"{summary['usable_bytes'] / count:.2f}", "")
    return table


def _timeline(summary: dict[str, Any]) -> Table:
    unit, count = common.unit_of(summary["peak_bytes"])
    table = Table("moment", unit)
    for name, size in summary["timeline"]:
        table.add_row(name, f"{size / count:.2f}")
    return table


def _verdict(summary: dict[str, Any]) -> str:
    space = summary["usable_bytes"] - summary["peak_bytes"]
    hint = f"{summary['hint']} ({common.size(summary['hint_bytes'])})"
    if summary["fits"]:
        more = f"; there is room for {hint}" if summary["hint"] else ""
        return f"fits, {common.size(space)} left{more}"
    nothing = "no change of micro-batch, ZeRO, recomputation, sp or cp is enough"
    return f"does not fit, {common.size(-space)} short; {f'try {hint}' if summary['hint'] else nothing}"
