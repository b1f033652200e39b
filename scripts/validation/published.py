"""Compare published runs with the estimate for this trainer: `python -m scripts.validation.published RUNS.csv`.

A row names its model by sizes, or by its name in `configs/shapes.py` where it has experts, and its machine by
`find_cluster`, so any run can be added to the file. None of the planner's constants was fitted to these runs.
"""

import dataclasses
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.markup import escape
from rich.table import Table

from scripts.validation.runs import Prediction, Row, count, lines, measured
from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.command_line import parse_remat
from ultrascale_jax.config import (
    MeshConfig,
    ModelConfig,
    MoEConfig,
    UserError,
    require,
)
from ultrascale_jax.configs import shapes
from ultrascale_jax.plan.formulas import memory
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.model_shape import ModelShape
from ultrascale_jax.plan.workload import Run, group
from ultrascale_jax.units import GIB

PRECISIONS = ("bf16", "fp32", "fp8")
NAMES = ("source", "software", "model")
SIZES = ("d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
COLUMNS = (
    *NAMES,
    *SIZES,
    *("gated", "gpu", "cluster", "gpus", "mesh", "seq_len", "mbs", "gas", "zero", "remat"),
    *("precision", "schedule", "virtual_stages", "tok_s_gpu", "mem_gib", "shape", "assumed"),
)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The rows of one software on one kind of GPU, with or without a pipeline and experts, in one precision."""

    software: str
    gpu: str
    pipeline: bool
    experts: bool
    precision: str
    rows: int
    median_ratio: float
    """Throughput predicted over measured."""
    median_error: float
    """Median of |log(predicted / measured)|."""
    worst_ratio: float
    """The furthest from 1."""


def read(path: Path) -> list[Row]:
    """Read the runs of a file like docs/planning/published_runs.csv; a `UserError` names line and column."""
    rows = []
    for where, line in lines(path, COLUMNS):
        try:
            rows.append(_row(line))
        except UserError as error:
            raise UserError(where + str(error)) from None
    return rows


def _row(line: dict[str, str]) -> Row:
    for name in NAMES:
        require(line[name] != "", name, line[name], "must not be empty")
    run = run_of(line)
    cluster = find_cluster(line["cluster"] or None, line["gpu"] or None, run.num_gpus)
    nodes = group(run.mesh, ("ep",), cluster.gpus_per_node).nodes
    run = dataclasses.replace(run, moe=MoEConfig(a2a_groups=nodes))
    speed = measured("tok_s_gpu", line["tok_s_gpu"])
    require(speed is not None, "tok_s_gpu", line["tok_s_gpu"], "must be a positive number")
    return Row(
        source=line["source"],
        software=line["software"],
        model=line["model"],
        run=run,
        cluster=cluster,
        tokens_per_s_gpu=speed,
        memory_gib=measured("mem_gib", line["mem_gib"]),
        assumed=line["assumed"],
    )


def run_of(line: dict[str, str]) -> Run:
    """Return the run of one line; a `UserError` names the column of an invalid value, or the mesh."""
    zero: Any = count("zero", line["zero"], 0, 3)
    precision: Any = line["precision"]
    fix = f"choose one of {', '.join(PRECISIONS)}"
    require(precision in PRECISIONS, "precision", precision, fix)
    mesh = MeshConfig.parse(line["mesh"]).resolve(count("gpus", line["gpus"]))
    seq_len = count("seq_len", line["seq_len"])
    require(seq_len % mesh.cp == 0, "seq_len", seq_len, f"cp={mesh.cp} must divide it")
    return Run(
        shape=_shape(line),
        mesh=mesh,
        seq_len=seq_len,
        sequences=count("mbs", line["mbs"]),
        microbatches=count("gas", line["gas"]),
        zero=zero,
        remat=parse_remat(line["remat"]),
        precision=precision,
        schedule=line["schedule"] or "1f1b",
        virtual_stages=count("virtual_stages", line["virtual_stages"]),
    )


def _shape(line: dict[str, str]) -> ModelShape:
    """Return the model that `shape` names, or its sizes."""
    if name := line["shape"]:
        model: Any = getattr(shapes, name, None)
        fix = "must be the name of a model in configs/shapes.py"
        require(isinstance(model, ModelConfig), "shape", name, fix)
        return ModelShape.of(model)
    sizes: dict[str, Any] = {name: count(name, line[name]) for name in SIZES}
    if not count("gated", line["gated"], 0, 1):
        # The planner counts three matrices of a feed-forward layer: as many parameters as two that are 3/2 as wide.
        sizes["d_ff"] = 64 * round(sizes["d_ff"] * 2 / 3 / 64)
    return ModelShape(**sizes)


def predict(row: Row) -> Prediction:
    """Predict throughput and memory of a row by this project's trainer."""
    return Prediction(
        row=row,
        tokens_per_s_gpu=estimate(row.run, row.cluster).tokens_per_s_gpu,
        memory_gib=memory.breakdown(row.run).peak_bytes / GIB,
    )


def summaries(predictions: Iterable[Prediction]) -> list[Summary]:
    """Group predictions by software, GPU, pipeline, experts and precision, and compare them with the measurements."""
    groups: dict[tuple[str, str, bool, bool, str], list[float]] = {}
    for one in predictions:
        run, gpu = one.row.run, one.row.cluster.gpu.name
        experts = run.shape.experts is not None
        key = (one.row.software, gpu, run.mesh.pp > 1, experts, run.precision)
        groups.setdefault(key, []).append(one.ratio)
    return [
        Summary(
            software=key[0],
            gpu=key[1],
            pipeline=key[2],
            experts=key[3],
            precision=key[4],
            rows=len(ratios),
            median_ratio=statistics.median(ratios),
            median_error=median_error(ratios),
            worst_ratio=max(ratios, key=lambda ratio: abs(math.log(ratio))),
        )
        for key, ratios in sorted(groups.items())
    ]


def median_error(ratios: Iterable[float]) -> float:
    """Return the median of |log(predicted / measured)|."""
    return statistics.median(abs(math.log(ratio)) for ratio in ratios)


def _runs(predictions: Iterable[Prediction], sources: Sequence[str]) -> Table:
    """Return a table with a line for each source, software, model and precision; sources by their place from 1."""
    groups: dict[tuple[str, str, str, str], list[Prediction]] = {}
    for one in predictions:
        row = one.row
        key = (str(sources.index(row.source) + 1), row.software, row.model, row.run.precision)
        groups.setdefault(key, []).append(one)
    names = ("source", "software", "model", "precision", "GPUs", "first mesh")
    table = output.table(names, ("measured", "predicted", "predicted / measured"))
    table.title, table.columns[4].justify = "tokens/s/GPU of published runs", "right"
    for key, similar in groups.items():
        first = similar[0].row.run
        table.add_row(
            *map(escape, key),
            _span([one.row.run.num_gpus for one in similar], "{}"),
            first.mesh.text if first.num_gpus > 1 else "1 GPU",
            _span([one.row.tokens_per_s_gpu or math.nan for one in similar], "{:,.0f}"),
            _span([one.tokens_per_s_gpu for one in similar], "{:,.0f}"),
            _span([one.ratio for one in similar], "{:.2f}"),
        )
    return table


def _span(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low}-{high}"


def _summary(summaries: Iterable[Summary]) -> Table:
    numbers = ("rows", "median predicted / measured", "median |log|", "worst")
    table = output.table(("software", "GPU", "", "precision"), numbers)
    for one in summaries:
        table.add_row(
            escape(one.software),
            one.gpu,
            ("experts, " if one.experts else "") + ("pipeline" if one.pipeline else "no pipeline"),
            one.precision,
            str(one.rows),
            f"{one.median_ratio:.2f}",
            f"{one.median_error:.2f}",
            f"{one.worst_ratio:.2f}",
        )
    return table


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of this comparison."""

    runs: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUNS.csv")]
    """Runs in the columns of docs/planning/published_runs.csv."""


def main(argv: Sequence[str]) -> None:
    with command_line.user_errors():
        prog = "python -m scripts.validation.published"
        options = command_line.read(Options, argv, prog=prog, description=__doc__ or "")
        predictions = [predict(row) for row in read(options.runs)]
    console = output.console(150)
    sources = list(dict.fromkeys(one.row.source for one in predictions))
    console.print(_runs(predictions, sources))
    for n, source in enumerate(sources, start=1):
        console.print(f"source {n}: {source}", markup=False, soft_wrap=True)
    console.print(_summary(summaries(predictions)))
    ratios = [one.ratio for one in predictions]
    median = f"median predicted / measured {statistics.median(ratios):.2f}"
    console.print(f"{len(ratios)} runs: {median}, median |log| {median_error(ratios):.2f}")
    console.print("Compared is the estimate for this project's trainer, not for theirs.")


if __name__ == "__main__":
    main(sys.argv[1:])
