"""Runs of other trainers as their makers published them, beside the estimate for this project's trainer.

A row names its model by sizes and its machine by `find_cluster`, so any run can be added to the file. None of the
planner's constants was fitted to these runs.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from scripts.validation.benchmark import beside, count, lines, measured
from ultrascale_jax.cli import output
from ultrascale_jax.config import MeshConfig, TrainConfig, UserError, require
from ultrascale_jax.plan.formulas import memory
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import Cluster, find_cluster
from ultrascale_jax.plan.workload import GIB, Run
from ultrascale_jax.training.model_shape import ModelShape

PRECISIONS = ("bf16", "fp32", "fp8")
NAMES = ("source", "software", "model")
SIZES = ("d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
COLUMNS = (
    *NAMES,
    *SIZES,
    *("gated", "gpu", "cluster", "gpus", "mesh", "seq_len", "mbs", "gas", "zero", "remat"),
    *("precision", "schedule", "virtual_stages", "tok_s_gpu", "mem_gib", "assumed"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published run."""

    source: str
    software: str
    model: str
    run: Run
    cluster: Cluster
    tokens_per_s_gpu: float
    memory_gib: float | None
    """Measured, as the throughput; none if it was not published."""
    assumed: str
    """Assumptions where the source is silent."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A row with what the formulas say of the same run by this project's trainer (software `ULTRASCALE`)."""

    row: Row
    tokens_per_s_gpu: float
    memory_gib: float

    @property
    def ratio(self) -> float:
        """Throughput predicted over measured."""
        return self.tokens_per_s_gpu / self.row.tokens_per_s_gpu


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The rows of one software, with or without a pipeline, in one precision."""

    software: str
    pipeline: bool
    precision: str
    rows: int
    median_ratio: float
    """Throughput predicted over measured."""
    median_error: float
    """Median of |log(predicted / measured)|."""
    worst_ratio: float
    """The furthest from 1."""


def is_published(path: Path) -> bool:
    """Whether the file has the column `software`, unlike the benchmark; `UserError` if it is no CSV with rows."""
    return "software" in lines(path, ())[0][1]


def read(path: Path) -> list[Row]:
    """The runs of a file like docs/planning/published_runs.csv; a `UserError` names line and column."""
    found = []
    for where, line in lines(path, COLUMNS):
        try:
            found.append(_row(line))
        except UserError as error:
            raise UserError(where + str(error)) from None
    return found


def _row(line: dict[str, str]) -> Row:
    for name in NAMES:
        require(line[name] != "", name, line[name], "must not be empty")
    run = run_of(line)
    speed = measured("tok_s_gpu", line["tok_s_gpu"])
    require(speed is not None, "tok_s_gpu", line["tok_s_gpu"], "must be a positive number")
    return Row(
        source=line["source"],
        software=line["software"],
        model=line["model"],
        run=run,
        cluster=find_cluster(line["cluster"] or None, line["gpu"] or None, run.num_gpus),
        tokens_per_s_gpu=speed or 0.0,
        memory_gib=measured("mem_gib", line["mem_gib"]),
        assumed=line["assumed"],
    )


def run_of(line: dict[str, str]) -> Run:
    """The run of one line; `UserError` names the column of a value that makes no sense, or the mesh."""
    sizes: dict[str, Any] = {name: count(name, line[name]) for name in SIZES}
    zero: Any = count("zero", line["zero"], 0, 3)
    precision: Any = line["precision"]
    fix = f"choose one of {', '.join(PRECISIONS)}"
    require(precision in PRECISIONS, "precision", precision, fix)
    mesh = MeshConfig.parse(line["mesh"]).resolve(count("gpus", line["gpus"]))
    seq_len = count("seq_len", line["seq_len"])
    require(seq_len % mesh.cp == 0, "seq_len", seq_len, f"cp={mesh.cp} must divide it")
    return Run(
        shape=ModelShape(**sizes, gated=count("gated", line["gated"], 0, 1) == 1),
        mesh=mesh,
        seq_len=seq_len,
        sequences=count("mbs", line["mbs"]),
        microbatches=count("gas", line["gas"]),
        zero=zero,
        remat=TrainConfig(remat=line["remat"]).remat,
        precision=precision,
        schedule=line["schedule"] or "1f1b",
        virtual_stages=count("virtual_stages", line["virtual_stages"]),
    )


def predict(row: Row) -> Prediction:
    """Throughput and memory of a row by this project's trainer."""
    return Prediction(
        row=row,
        tokens_per_s_gpu=estimate(row.run, row.cluster).tokens_per_s_gpu,
        memory_gib=memory.breakdown(row.run).peak_bytes / GIB,
    )


def summaries(predictions: Iterable[Prediction]) -> list[Summary]:
    """Predictions by software, pipeline and precision, compared with what was measured."""
    groups: dict[tuple[str, bool, str], list[float]] = {}
    for one in predictions:
        run = one.row.run
        key = (one.row.software, run.mesh.pp > 1, run.precision)
        groups.setdefault(key, []).append(one.ratio)
    return [
        Summary(
            software=key[0],
            pipeline=key[1],
            precision=key[2],
            rows=len(ratios),
            median_ratio=statistics.median(ratios),
            median_error=median_error(ratios),
            worst_ratio=max(ratios, key=lambda ratio: abs(math.log(ratio))),
        )
        for key, ratios in sorted(groups.items())
    ]


def median_error(ratios: Iterable[float]) -> float:
    """Median of |log(predicted / measured)|."""
    return statistics.median(abs(math.log(ratio)) for ratio in ratios)


def show(published: Iterable[Row], as_json: bool) -> None:
    """Prints the comparison: tables, or one JSON object."""
    predictions = [predict(row) for row in published]
    found = summaries(predictions)
    if as_json:
        rows = [_figures(one) for one in predictions]
        summary = [dataclasses.asdict(one) for one in found]
        result = {"kind": "published", "rows": rows, "summary": summary}
        print(output.verb_json("validate", result))
        return
    console = output.console(150)
    sources = list(dict.fromkeys(one.row.source for one in predictions))
    console.print(_runs(predictions, sources))
    for n, source in enumerate(sources, start=1):
        console.print(f"source {n}: {source}", markup=False, soft_wrap=True)
    console.print(_summary(found))
    ratios = [one.ratio for one in predictions]
    console.print(
        f"{len(ratios)} runs: median predicted / measured {statistics.median(ratios):.2f}, "
        f"median |log| {median_error(ratios):.2f}",
        soft_wrap=True,
    )
    text = (
        "Compared is the estimate for this project's trainer (software ULTRASCALE), not for theirs."
    )
    console.print(text, soft_wrap=True)


def _figures(one: Prediction) -> dict[str, Any]:
    """One run, for `report`."""
    row = one.row
    return beside(one) | {
        "source": row.source,
        "software": row.software,
        "model": row.model,
        "precision": row.run.precision,
        "gpus": row.run.num_gpus,
        "mesh": {axis: size for axis, size in row.run.mesh.sizes.items() if size > 1},
        "ratio": one.ratio,
        "assumed": row.assumed,
    }


def _runs(predictions: Iterable[Prediction], sources: Sequence[str]) -> Table:
    """One line for the runs of one source, software, model and precision; sources by their place from 1."""
    groups: dict[tuple[str, str, str, str], list[Prediction]] = {}
    for one in predictions:
        row = one.row
        key = (str(sources.index(row.source) + 1), row.software, row.model, row.run.precision)
        groups.setdefault(key, []).append(one)
    names = ("source", "software", "model", "precision", "GPUs", "first mesh")
    table = output.table(names, ("measured", "predicted", "predicted / measured"))
    table.title, table.columns[4].justify = "tokens/s/GPU of published runs", "right"
    for key, group in groups.items():
        first = group[0].row.run
        table.add_row(
            *map(escape, key),
            _span([one.row.run.num_gpus for one in group], "{}"),
            first.mesh.text if first.num_gpus > 1 else "1 GPU",
            _span([one.row.tokens_per_s_gpu for one in group], "{:,.0f}"),
            _span([one.tokens_per_s_gpu for one in group], "{:,.0f}"),
            _span([one.ratio for one in group], "{:.2f}"),
        )
    return table


def _span(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low}-{high}"


def _summary(found: Iterable[Summary]) -> Table:
    numbers = ("rows", "median predicted / measured", "median |log|", "worst")
    table = output.table(("software", "", "precision"), numbers)
    for one in found:
        table.add_row(
            escape(one.software),
            "pipeline" if one.pipeline else "no pipeline",
            one.precision,
            str(one.rows),
            f"{one.median_ratio:.2f}",
            f"{one.median_error:.2f}",
            f"{one.worst_ratio:.2f}",
        )
    return table
