"""Figures of a run that nobody has made: memory by the planner's formulas, and then `speeds.py`."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from ultrascale_jax.plan.formulas.memory import breakdown, timeline
from ultrascale_jax.plan.report import files, schedules, speeds
from ultrascale_jax.plan.report.figures import Bar, Bars, Figure
from ultrascale_jax.plan.report.study import SPLITS, Scenario, powers
from ultrascale_jax.plan.search.search_space import REMAT
from ultrascale_jax.plan.workload import GIB, Run


def figures(
    study: Scenario,
    models: Sequence[Scenario],
    max_nodes: int,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[Figure]:
    """All figures of `study`, one after the other; the heat map of `models` comes last and reports to `tell`."""
    yield memory(study)
    yield by_sequence(study)
    yield by_zero(study)
    yield by_split(study)
    yield speeds.step_parts(study)
    yield speeds.scaling(study)
    yield speeds.cheat_sheet(study)
    yield schedules.bubbles()
    yield speeds.best(models, max_nodes, tell)


def memory(study: Scenario) -> Figure:
    """The configuration itself."""
    run = study.run
    content = {
        "label": run.label,
        "gpu": study.cluster.gpu.name,
        "parts": breakdown(run).parts,
        "timeline": timeline(run),
        "usable_bytes": study.cluster.gpu.usable_bytes,
    }
    (figure,) = files.memory([content])
    return dataclasses.replace(figure, title=f"Memory of one GPU: {run.label}")


def stack(run: Run, label: str) -> Bar:
    """The memory of `run` in GiB."""
    return Bar(
        label=label, parts={n: size / GIB for n, size in breakdown(run).parts.items() if size}
    )


def by_sequence(study: Scenario) -> Figure:
    """Memory by recompute policy and sequence length, one sequence a micro-batch (the playbook's widget)."""
    run, own = study.run, study.run.seq_len
    policies = dict.fromkeys((*REMAT, run.remat))
    lengths = [own // 4, own // 2, own, own * 2, own * 4]
    panels = {
        f"recompute {remat}": [
            stack(
                dataclasses.replace(run, remat=remat, seq_len=length, sequences=1), _length(length)
            )
            for length in lengths
            if length % (run.mesh.cp * run.mesh.sp) == 0 and length > 0
        ]
        for remat in policies
    }
    return Bars(
        name="memory_sequence",
        title=f"Memory of one GPU by recomputation and sequence length: {study.name}",
        caption=f"Peak of a step at one sequence a micro-batch, mesh and ZeRO stage of {run.label}. "
        "Recomputation and context parallelism are what makes long sequences fit.",
        panels=panels,
        unit="GiB",
        x="sequence length (tokens)",
        **study.limit,
    )


def by_zero(study: Scenario) -> Figure:
    """Memory by ZeRO stage and number of GPUs that share the state."""
    run = study.run
    rest = run.num_gpus // run.shards // run.mesh.dp
    sizes = [n for n in powers(max(run.num_gpus, 8)) if rest * n <= max(run.num_gpus, 8)]
    keep = {axis: size for axis, size in run.mesh.sizes.items() if axis in ("pp", "sp", "tp")}
    panels: dict[str, list[Bar]] = {}
    for zero in (0, 1, 2, 3):
        runs = {n: study.varied(keep | {"fsdp": n}, zero=zero) for n in sizes}
        panels[f"ZeRO {zero}"] = [stack(r, str(n)) for n, r in runs.items() if r is not None]
    return Bars(
        name="memory_zero",
        title=f"Memory of one GPU by ZeRO stage and data-parallel size: {study.name}",
        caption=f"Peak of a step at one sequence of {run.seq_len:,} tokens a micro-batch, recompute {run.remat}. "
        "ZeRO 1 shards optimizer state and master weights, 2 also gradients, 3 also parameters.",
        panels=panels,
        unit="GiB",
        x="GPUs that share the state",
        **study.limit,
    )


def by_split(study: Scenario) -> Figure:
    """Memory by the axis that splits the model or the sequence."""
    sizes = powers(min(2 * study.cluster.gpus_per_node, 32))
    panels: dict[str, list[Bar]] = {}
    for axis, title in SPLITS.items():
        runs = {size: study.varied({axis: size}) for size in sizes}
        if bars := [stack(run, str(size)) for size, run in runs.items() if run is not None]:
            panels[title] = bars
    run = study.run
    return Bars(
        name="memory_axis",
        title=f"Memory of one GPU by model axis: {study.name}",
        caption=f"One axis alone, on as many GPUs as the label says (ZeRO {run.zero} shards over cp too); one "
        f"sequence of {run.seq_len:,} tokens a micro-batch, recompute {run.remat}, pipeline {run.schedule}.",
        panels=panels,
        unit="GiB",
        x="GPUs = size of the axis",
        **study.limit,
    )


def _length(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
