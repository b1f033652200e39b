"""Draw one model in many variants, by the planner's formulas: `python -m scripts.studies NAME [RECIPE] --out FILE.png`.

Figures of the course and of docs/planning.md. NAME is one of memory_sequence, memory_zero, memory_tensor, microbatches,
step_parts, scaling, communication and best; the options equal `ultrascale plan memory`'s. `measured FILE.csv`
draws the fastest runs of a table such as tests/data/plan/playbook_runs.csv.
"""

import csv
import dataclasses
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from docs.drawings.charts import Cell, Heat, Lines
from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.cli.plan_commands.words import parse_choices, recipe_of
from ultrascale_jax.config import (
    REMAT_POLICIES,
    Config,
    MeshConfig,
    UserError,
    require,
    with_changes,
)
from ultrascale_jax.figures.charts import Bar, Bars, Point
from ultrascale_jax.figures.figure import Figure
from ultrascale_jax.plan.formulas import cheatsheet
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.report.layout import limit, wrap
from ultrascale_jax.plan.search.ranking import Candidate, Search
from ultrascale_jax.plan.search.search_space import Choices
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.storage.foreign import read_foreign, utf8
from ultrascale_jax.units import GIB

SPLITS = {
    "sp": "tensor and sequence (sp)",
    "tp": "tensor (tp)",
    "cp": "context (cp)",
    "pp": "pipeline (pp)",
}
"""Axes that split the model or the sequence, and their names in figures."""

CELL_WIDTH = 17
"""Characters of a line in a cell of the heat map."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One model on one cluster, to be varied."""

    name: str
    """Name of the recipe."""
    cfg: Config
    cluster: Cluster
    choices: Choices = field(default_factory=dict)
    """Values that the search for the fastest configuration is pinned to."""

    @property
    def run(self) -> Run:
        """The configuration as it is.

        Raises:
          UserError: the mesh does not divide the model, the batch or the GPUs.
        """
        return Run.of(self.cfg, self.cluster.num_gpus)

    def varied(self, mesh: dict[str, int], sequences: int = 1, **train: Any) -> Run | None:
        """Change the mesh, the sequences of a micro-batch and other fields of `train`; None if the run is illegal.

        The global batch stays, or grows to one micro-batch for each stage on each batch shard.
        """
        sizes = MeshConfig.of(**mesh)
        least = sizes.batch * sequences
        rounds = max(self.cfg.train.global_batch // least, sizes.pp)
        train |= {"microbatches": rounds, "global_batch": rounds * least}
        cfg = with_changes(self.cfg, mesh=sizes, **train)
        count = sizes.batch * sizes.cp * sizes.tensor * sizes.pp
        with warnings.catch_warnings():
            # Tensor groups larger than a node warn; the study shows that they are slow.
            warnings.simplefilter("ignore")
            try:
                return Run.of(cfg, count)
            except UserError:
                return None

    def estimated(self, run: Run) -> StepPrediction:
        """Estimate a step of `run` on as many GPUs as it has."""
        return estimate(run, dataclasses.replace(self.cluster, num_gpus=run.num_gpus))


def powers(most: int) -> list[int]:
    """Return 1, 2, 4 ... up to `most`."""
    return [2**n for n in range(most.bit_length())]


def stack(run: Run, label: str) -> Bar:
    """Return the memory of `run` in GiB."""
    return Bar(
        label=label, parts={n: size / GIB for n, size in breakdown(run).parts.items() if size}
    )


def by_length(run: Run, seq_len: int) -> list[Bar]:
    """Return the memory of `run` at one sequence a micro-batch, of a quarter to four times `seq_len` tokens."""
    lengths = (seq_len // 4, seq_len // 2, seq_len, 2 * seq_len, 4 * seq_len)
    return [
        stack(dataclasses.replace(run, seq_len=length, sequences=1), _length(length))
        for length in lengths
        if length > 0 and length % (run.mesh.cp * run.mesh.sp) == 0
    ]


def by_sequence(scenario: Scenario) -> Figure:
    """Draw memory by recompute policy and sequence length, one sequence a micro-batch (the playbook's widget)."""
    run = scenario.run
    panels = {
        f"recompute {remat}": by_length(dataclasses.replace(run, remat=remat), run.seq_len)
        for remat in dict.fromkeys((*REMAT_POLICIES, run.remat))
    }
    return Bars(
        name="memory_sequence",
        title=f"Memory of one GPU by recomputation and sequence length: {scenario.name}",
        caption=f"Peak of a step at one sequence a micro-batch, mesh and ZeRO stage of {run.label}. "
        "Recomputation and context parallelism are what makes long sequences fit.",
        panels=panels,
        unit="GiB",
        x="sequence length (tokens)",
        **limit(scenario.cluster.gpu),
    )


def by_zero(scenario: Scenario) -> Figure:
    """Draw memory by ZeRO stage and number of GPUs that share the state."""
    run = scenario.run
    other_ranks = run.num_gpus // run.shards // run.mesh.dp
    sizes = [n for n in powers(max(run.num_gpus, 8)) if other_ranks * n <= max(run.num_gpus, 8)]
    keep = {axis: size for axis, size in run.mesh.sizes.items() if axis in ("pp", "sp", "tp")}
    panels: dict[str, list[Bar]] = {}
    for zero in (0, 1, 2, 3):
        runs = {n: scenario.varied(keep | {"fsdp": n}, zero=zero) for n in sizes}
        panels[f"ZeRO {zero}"] = [stack(r, str(n)) for n, r in runs.items() if r is not None]
    return Bars(
        name="memory_zero",
        title=f"Memory of one GPU by ZeRO stage and data-parallel size: {scenario.name}",
        caption=f"Peak of a step at one sequence of {run.seq_len:,} tokens a micro-batch, recompute {run.remat}. "
        "ZeRO 1 shards optimizer state and master weights, 2 also gradients, 3 also parameters.",
        panels=panels,
        unit="GiB",
        x="GPUs that share the state",
        **limit(scenario.cluster.gpu),
    )


def by_tensor(scenario: Scenario) -> Figure:
    """Draw memory by sequence length with no tensor group, and one of a node as tp and as sp; the others are fsdp."""
    seq_len, gpus = scenario.run.seq_len, scenario.cluster.num_gpus
    node = powers(min(scenario.cluster.gpus_per_node, gpus))[-1]
    panels: dict[str, list[Bar]] = {}
    for axes in ({}, {"tp": node}, {"sp": node}):
        run = scenario.varied({**axes, "fsdp": gpus // math.prod(axes.values())})
        if run is not None:
            panels[run.mesh.text.replace("=", " ").replace(",", ", ")] = by_length(run, seq_len)
    run = scenario.run
    return Bars(
        name="memory_tensor",
        title=f"Memory of one GPU by tensor group and sequence length: {scenario.name}",
        caption=f"Peak of a step at one sequence a micro-batch on {gpus} GPUs, ZeRO {run.zero}, recompute {run.remat}. "
        "A tensor group splits what lies between a layer's products; as sp also the inputs of layers and norms.",
        panels=panels,
        unit="GiB",
        x="sequence length (tokens)",
        **limit(scenario.cluster.gpu),
    )


def by_microbatches(scenario: Scenario) -> Figure:
    """Draw memory and throughput by the number of micro-batches of a step, whose global batch stays."""
    run = scenario.run
    rows = run.sequences * run.microbatches
    panels: dict[str, dict[str, list[Point]]] = {
        "memory of one GPU (GiB)": {},
        "throughput (tokens/s/GPU)": {},
    }
    for remat in dict.fromkeys((*REMAT_POLICIES, run.remat)):
        for number in (n for n in powers(rows) if rows % n == 0):
            changes = {"sequences": rows // number, "microbatches": number, "remat": remat}
            step = scenario.estimated(dataclasses.replace(run, **changes))
            for lines, y in zip(
                panels.values(), (step.peak_bytes / GIB, step.tokens_per_s_gpu), strict=True
            ):
                point = Point(x=number, y=y, solid=step.may_fit)
                lines.setdefault(f"recompute {remat}", []).append(point)
    return Lines(
        name="microbatches",
        title=f"Memory and throughput by number of micro-batches: {scenario.name} on {run.num_gpus} GPUs",
        caption=f"A step of {run.step_tokens:,} tokens, {rows} sequences on each batch shard, cut into as many "
        f"micro-batches as the axis says; mesh and ZeRO stage of {run.label}, by the planner's formulas.",
        panels=panels,
        x="micro-batches of a step",
        y="",
        hollow="does not fit",
        scale="none",
    )


def _length(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def fastest(scenario: Scenario, mesh: dict[str, int]) -> StepPrediction | None:
    """Return the mesh with its fastest micro-batch that fits; with one sequence if none fits."""
    batch = scenario.run.global_batch
    steps: list[StepPrediction] = []
    for sequences in powers(64):
        run = scenario.varied(mesh, sequences=sequences)
        if run is not None and run.global_batch == batch:
            steps.append(scenario.estimated(run))
    fitting = [step for step in steps if step.may_fit] or steps[:1]
    return max(fitting, key=lambda step: step.tokens_per_s_gpu, default=None)


def step_parts(scenario: Scenario) -> Figure:
    """Stack the parts of a step's time, by the same meshes."""
    gpus, panels = scenario.cluster.num_gpus, {}
    for axis, title in SPLITS.items():
        for size in powers(min(gpus, 2 * scenario.cluster.gpus_per_node, 32)):
            if gpus % size == 0 and (step := fastest(scenario, {axis: size, "fsdp": gpus // size})):
                label = f"{size}" + ("" if step.may_fit else "*")
                bar = Bar(label=label, parts=dict(step.parts))
                panels.setdefault(title, []).append(bar)
    run = scenario.run
    return Bars(
        name="step_parts",
        title=f"Where the time of a step goes: {scenario.name} on {scenario.cluster.num_gpus} GPUs",
        caption=f"One step of {run.step_tokens:,} tokens by plan/formulas/step_time.py. One axis as large as the label "
        f"says, fsdp (ZeRO {run.zero}) takes the other GPUs; recompute {run.remat}, and the micro-batch that is "
        "fastest among those that fit; a star: none fits.",
        panels=panels,
        unit="seconds a step",
        x="size of the axis",
    )


def scaling(scenario: Scenario) -> Figure:
    """Draw tokens/s/GPU of every axis alone, as its size grows."""
    gpus = max(scenario.cluster.num_gpus, 8)
    panels: dict[str, dict[str, list[Point]]] = {}
    for title, axes in (("batch split", ("dp", "fsdp")), ("model or sequence split", SPLITS)):
        for axis in axes:
            points = [
                point for size in powers(gpus) if (point := _axis_point(scenario, axis, size))
            ]
            if len(points) > 1:
                panels.setdefault(title, {})[axis] = points
    run = scenario.run
    return Lines(
        name="scaling",
        title=f"Throughput of each axis alone: {scenario.name} on {scenario.cluster.gpu.name}",
        caption=f"Tokens/s/GPU by plan/formulas/step_time.py with one axis as large as the number of GPUs, a step of "
        f"{run.step_tokens:,} tokens, recompute {run.remat}, ZeRO {run.zero} over fsdp, and the micro-batch that is "
        "fastest among those that fit. A hollow point does not fit into memory and shows one sequence.",
        panels=panels,
        x="GPUs = size of the axis",
        y="tokens/s/GPU",
        hollow="does not fit",
    )


def _axis_point(scenario: Scenario, axis: str, size: int) -> Point | None:
    if (step := fastest(scenario, {axis: size})) is None:
        return None
    return Point(x=size, y=step.tokens_per_s_gpu, solid=step.may_fit)


def communication(scenario: Scenario) -> Figure:
    """Draw communication over computation of every axis alone, as its size grows."""
    gpus, run = max(scenario.cluster.num_gpus, 8), scenario.run
    few = min(gpus, 4 * scenario.cluster.gpus_per_node)
    panels: dict[str, dict[str, list[Point]]] = {}
    kinds = ("batch split", ("dp", "fsdp"), gpus), ("model or sequence split", SPLITS, few)
    for title, axes, most in kinds:
        for axis in axes:
            candidates = (_ratio_point(scenario, axis, size) for size in powers(most)[1:])
            if points := [point for point in candidates if point]:
                panels.setdefault(title, {})[axis] = points
    return Lines(
        name="communication",
        title=f"Communication over computation of each axis alone: {scenario.name} on {scenario.cluster.gpu.name}",
        caption="Time of a step's communication over the time of the computation that it can hide behind, by "
        f"plan/formulas/cheatsheet.py, with one axis as large as the number of GPUs, a step of {run.step_tokens:,} "
        f"tokens, one sequence of {run.seq_len:,} tokens a micro-batch and ZeRO {run.zero} over fsdp. dp, and fsdp "
        "with ZeRO 0 or 1, communicate once a step, and are compared with the backward passes of all micro-batches. "
        f"{scenario.cluster.intra_gbs:.0f} GB/s in a node, {scenario.cluster.inter_gbs:.0f} GB/s a GPU between nodes.",
        panels=panels,
        x="GPUs = size of the axis",
        y="communication / computation",
        log=True,
        limit=1,
        limit_name="above: exposed",
    )


def _ratio_point(scenario: Scenario, axis: str, size: int) -> Point | None:
    run = scenario.varied({axis: size})
    if run is None or run.global_batch != scenario.run.global_batch:
        return None
    cluster = dataclasses.replace(scenario.cluster, num_gpus=run.num_gpus)
    stage = {"dp": "DP", "fsdp": f"ZeRO-{run.zero}" if run.zero else "DP"}.get(axis)
    rows = cheatsheet.cheat_sheet(run, cluster)
    row = next(row for row in rows if row.strategy == stage or (not stage and row.axis == axis))
    once = stage in ("DP", "ZeRO-1")
    return Point(x=size, y=row.ratio / (run.microbatches if once else 1))


def best(
    models: Sequence[Scenario], max_nodes: int, tell: Callable[[str], None] = lambda text: None
) -> Figure:
    """Draw the fastest configuration that fits of each model on 1, 2, 4 ... nodes, by search over the formulas."""
    nodes, cells = powers(max_nodes), {}
    cluster = models[0].cluster
    node = powers(cluster.gpus_per_node)[-1]
    places = [(scenario, n) for scenario in models for n in nodes]
    for done, (scenario, n) in enumerate(places):
        tell(f"searching meshes, {done} of {len(places)}")
        search = Search(
            scenario.cfg, dataclasses.replace(cluster, num_gpus=n * node), scenario.choices
        )
        search.predict()
        if search.winner is not None:
            cells[scenario.name, str(n)] = _cell(search.winner)
    batches = sorted({m.cfg.train.global_batch * m.cfg.data.seq_len for m in models})
    return Heat(
        name="best",
        title="Fastest configuration by model and number of nodes",
        caption=f"Tokens/s/GPU of the fastest configuration that fits, by the formulas, at "
        f"{' / '.join(f'{b:,}' for b in batches)} tokens a step, with {node} GPUs of each node, "
        f"{cluster.gpu.name}.",
        rows=tuple(scenario.name for scenario in models),
        columns=tuple(map(str, nodes)),
        cells=cells,
        unit="tokens/s/GPU",
        x="nodes",
        absent="none fits",
    )


def _cell(candidate: Candidate) -> Cell:
    run = candidate.run
    axes = [f"{axis}{size}" for axis, size in run.mesh.sizes.items() if size > 1]
    zero = f"zero{run.zero} " if run.zero else ""
    lines = (
        " ".join(axes),
        f"{zero}mbs{run.sequences} x{run.microbatches}",
        str(run.remat).replace(",", ", ").replace("+", " +"),
        f"{candidate.best.peak_bytes / GIB:.1f} GiB",
    )
    text = "\n".join(wrap(line, CELL_WIDTH) for line in lines)
    return Cell(value=candidate.best.tokens_per_s_gpu, text=text)


STUDIES: dict[str, Callable[[Scenario], Figure]] = {
    "memory_sequence": by_sequence,
    "memory_zero": by_zero,
    "memory_tensor": by_tensor,
    "microbatches": by_microbatches,
    "step_parts": step_parts,
    "scaling": scaling,
    "communication": communication,
}
"""Figures of one scenario, by name."""


def measured(path: Path) -> Heat:
    """Draw the fastest run of each model and number of nodes in a table of runs; a `UserError` names what it lacks."""
    columns = ("model", "nodes", "mbs", "gas", "dp", "pp", "tp", "zero", "tok_s_gpu", "mem_gb")
    rows = list(csv.DictReader(utf8(read_foreign(path, name="file")).splitlines()))
    missing = [name for name in columns if not rows or name not in rows[0]]
    require(not missing, "file", str(path), f"lacks the column(s) {', '.join(missing)}")
    ran = [row for row in rows if row["tok_s_gpu"]]
    cells: dict[tuple[str, str], Cell] = {}
    for row in sorted(ran, key=lambda row: float(row["tok_s_gpu"])):  # the fastest stays
        axes = " ".join(f"{a}{row[a]}" for a in ("dp", "tp", "pp") if int(row[a]) > 1) or "1 GPU"
        text = f"{axes}\nmbs{row['mbs']} gas{row['gas']} z{row['zero']}\n{float(row['mem_gb']):.1f} GiB"
        cells[row["model"], row["nodes"]] = Cell(value=float(row["tok_s_gpu"]), text=text)
    note = f"{len(ran):,} runs of {path.name}; {len(rows) - len(ran):,} more crashed or ran out of memory."
    return Heat(
        name="measured",
        title="Fastest configuration by model and number of nodes",
        caption=f"Tokens/s/GPU of the fastest run of each model and number of nodes. {note}",
        rows=tuple(dict.fromkeys(row["model"] for row in ran)),
        columns=tuple(map(str, sorted({int(row["nodes"]) for row in ran}))),
        cells=cells,
        unit="tokens/s/GPU",
        x="nodes",
        absent="no run",
    )


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """Options of a study."""

    out: Annotated[Path, tyro.conf.arg(metavar="FILE.png")] = Path("out/study.png")
    """The picture."""
    models: Annotated[str | None, command_line.option("RECIPE,...", "the recipe alone")] = None
    """Rows of the heat map `best`."""
    max_nodes: Annotated[int, tyro.conf.arg(metavar="N")] = 64
    """Largest column of that heat map."""
    fixed: Annotated[str | None, command_line.option("FIELD=VALUE,...")] = None
    """Pin choices of its searches, as schedule=1f1b, which makes them several times faster."""


def scenario_of(argv: Sequence[str]) -> tuple[Scenario, Options]:
    """Return the model and the cluster that a command line describes."""
    cfg, options, cluster = common.parse(argv, "memory", Options, __doc__)
    cfg, _ = common.choose_open(cfg, options, cluster)
    choices = {} if options.fixed is None else parse_choices("fixed", options.fixed)
    name = recipe_of(list(argv))
    return Scenario(name=name, cfg=cfg, cluster=cluster, choices=choices), options


def main(argv: Sequence[str]) -> None:
    with command_line.user_errors():
        names = ("measured", "best", *STUDIES)
        name, *arguments = argv or [""]
        require(name in names, "name", name, f"choose one of {', '.join(names)}")
        if name == "measured":
            require(
                len(arguments) == 3 and arguments[1] == "--out",
                "file",
                arguments,
                "give FILE.csv --out FILE.png",
            )
            print(output.write_figure(measured(Path(arguments[0])), Path(arguments[2])))
            return
        scenario, options = scenario_of(arguments)
        if name == "best":
            words = arguments[1:] if arguments[:1] == [scenario.name] else arguments
            recipes = (options.models or scenario.name).split(",")
            models = [scenario_of([recipe.strip(), *words])[0] for recipe in recipes]
            with output.working("searching meshes") as tell:
                figure = best(models, options.max_nodes, tell)
        else:
            figure = STUDIES[name](scenario)
        print(output.write_figure(figure, options.out))


if __name__ == "__main__":
    main(sys.argv[1:])
