"""Figures of speed by the planner's formulas: a step's parts, scaling by axis, the cheat-sheet, the best meshes."""

import dataclasses
from collections.abc import Callable, Sequence

from ultrascale_jax.plan.formulas.cheatsheet import cheat_sheet as rows_of
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.report.figures import (
    Bar,
    Bars,
    Cell,
    Figure,
    Heat,
    Lines,
    Point,
    Sheet,
    Table,
)
from ultrascale_jax.plan.report.study import SPLITS, Scenario, powers
from ultrascale_jax.plan.search.ranking import Candidate, Search
from ultrascale_jax.plan.workload import GIB


def fastest(study: Scenario, mesh: dict[str, int]) -> StepPrediction | None:
    """The mesh with the micro-batch that is fastest among those that fit; with one sequence if none fits."""
    tried = [study.varied(mesh, sequences=sequences) for sequences in powers(64)]
    legal = [run for run in tried if run is not None and run.global_batch == study.run.global_batch]
    runs = [run for run in legal if study.fits(run)] or legal[:1]
    found = [estimate(run, study.sized(run)) for run in runs]
    return max(found, key=lambda step: step.tokens_per_s_gpu, default=None)


def step_parts(study: Scenario) -> Figure:
    """Where the time of a step goes, by the same meshes."""
    gpus, panels = study.cluster.num_gpus, {}
    for axis, title in SPLITS.items():
        for size in powers(min(gpus, 2 * study.cluster.gpus_per_node, 32)):
            if gpus % size == 0 and (found := fastest(study, {axis: size, "fsdp": gpus // size})):
                label = f"{size}" + ("" if found.fits else "*")
                bar = Bar(label=label, parts=dict(found.parts), note=found.run.label)
                panels.setdefault(title, []).append(bar)
    run = study.run
    return Bars(
        name="step_parts",
        title=f"Where the time of a step goes: {study.name} on {study.cluster.num_gpus} GPUs",
        caption=f"One step of {run.step_tokens:,} tokens by plan/formulas/step_time.py. One axis as large as the label "
        f"says, fsdp (ZeRO {run.zero}) takes the other GPUs; recompute {run.remat}, and the micro-batch that is "
        "fastest among those that fit; a star: none fits.",
        panels=panels,
        unit="seconds a step",
        x="size of the axis",
    )


def scaling(study: Scenario) -> Figure:
    """Tokens/s/GPU of every axis alone, as its size grows."""
    gpus = max(study.cluster.num_gpus, 8)
    panels: dict[str, dict[str, list[Point]]] = {}
    for title, axes in (("batch split", ("dp", "fsdp")), ("model or sequence split", SPLITS)):
        for axis in axes:
            points = [point for size in powers(gpus) if (point := _alone(study, axis, size))]
            if len(points) > 1:
                panels.setdefault(title, {})[axis] = points
    run = study.run
    return Lines(
        name="scaling",
        title=f"Throughput of each axis alone: {study.name} on {study.cluster.gpu.name}",
        caption=f"Tokens/s/GPU by plan/formulas/step_time.py with one axis as large as the number of GPUs, a step of "
        f"{run.step_tokens:,} tokens, recompute {run.remat}, ZeRO {run.zero} over fsdp, and the micro-batch that is "
        "fastest among those that fit. A hollow point does not fit into memory and shows one sequence.",
        panels=panels,
        x="GPUs = size of the axis",
        y="tokens/s/GPU",
        hollow="does not fit",
    )


def _alone(study: Scenario, axis: str, size: int) -> Point | None:
    if (found := fastest(study, {axis: size})) is None:
        return None
    return Point(x=size, y=found.tokens_per_s_gpu, solid=found.fits, note=found.run.label)


def best(
    models: Sequence[Scenario], max_nodes: int, tell: Callable[[str], None] = lambda text: None
) -> Figure:
    """The fastest configuration that fits of each model on 1, 2, 4 ... nodes, by search over the formulas."""
    nodes, cells = powers(max_nodes), {}
    cluster = models[0].cluster
    node = powers(cluster.gpus_per_node)[-1]
    places = [(study, n) for study in models for n in nodes]
    for done, (study, n) in enumerate(places):
        tell(f"searching meshes, {done} of {len(places)}")
        found = _search(study, dataclasses.replace(cluster, num_gpus=n * node))
        if found is not None:
            cells[study.name, str(n)] = _cell(found)
    batches = sorted({m.cfg.train.global_batch * m.cfg.data.seq_len for m in models})
    return Heat(
        name="best",
        title="Fastest configuration by model and number of nodes",
        caption=f"Tokens/s/GPU of the fastest configuration that fits, by the formulas, at "
        f"{' / '.join(f'{b:,}' for b in batches)} tokens a step, with {node} GPUs of each node, "
        f"{cluster.gpu.name}; of what this release can train, or of all plans (marked *) where it can train none.",
        rows=tuple(study.name for study in models),
        columns=tuple(map(str, nodes)),
        cells=cells,
        unit="tokens/s/GPU",
        x="nodes",
        absent="none fits",
    )


def _search(study: Scenario, cluster: Cluster) -> Candidate | None:
    """The fastest that the trainer can run, or else the fastest."""
    precision = study.changes.get("precision")
    search = Search(study.cfg, cluster, shape=study.shape, precision=precision)
    search.predict()
    return search.winner or next((c for c in search.ranking if c.best.fits), None)


def _cell(candidate: Candidate) -> Cell:
    run = candidate.run
    axes = [f"{axis}{size}" for axis, size in run.mesh.sizes.items() if size > 1]
    axes += [f"zero{run.zero}"] if run.zero else []
    text = (
        " ".join(axes) + "*" * bool(candidate.refusal),
        f"mbs{run.sequences} x{run.microbatches} {run.remat}",
        f"{candidate.best.peak_bytes / GIB:.1f} GiB",
    )
    return Cell(value=candidate.best.tokens_per_s_gpu, text="\n".join(text))


def cheat_sheet(study: Scenario) -> Figure:
    """The playbook's cheat-sheet for this model on this cluster."""
    run, cluster = study.run, study.cluster
    rows = rows_of(run, cluster)
    names = [f"{row.strategy} ({row.axis} {row.size}){', in use' * row.used}" for row in rows]
    head = (
        *("strategy", "batch", "memory", "compute", "communication / computation"),
        *("sends (GiB a step)", "communication (ms)", "computation (ms)", "ratio", ""),
    )
    body = tuple(
        (
            name,
            *(row.batch, row.memory, row.compute, row.communication, row.volume / GIB),
            *(1e3 * row.communication_s, 1e3 * row.computation_s, row.ratio),
            "can hide" if row.hidden else "is exposed",
        )
        for name, row in zip(names, rows, strict=True)
    )
    return Sheet(
        name="cheat_sheet",
        title=f"The playbook's cheat-sheet: {study.name} on {cluster.num_gpus} {cluster.gpu.name}",
        caption="Communication over the computation that it can hide behind, by plan/formulas/cheatsheet.py: below "
        "1 it can hide. Dense peak and data-sheet bandwidths "
        f"({cluster.intra_gbs:.0f} GB/s in a node, {cluster.inter_gbs:.0f} "
        f"GB/s a GPU between nodes), {run.tokens:,} tokens of a micro-batch on one GPU. An axis that the run does not "
        "use has the size that the cluster suggests. n: size of the axis; N, K: heads and kv heads; h: width; T: "
        "tokens of a micro-batch on one GPU; F: FLOP/s; B: bytes/s.",
        sheet=Table(head=head, rows=body),
        ratios={name: row.ratio for name, row in zip(names, rows, strict=True)},
        x="communication / computation",
    )
