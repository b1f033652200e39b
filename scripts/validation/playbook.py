"""Compare the formulas, with nanotron's settings, with the runs of the playbook's benchmark.

nanotron's settings are bf16 with fp32 accumulation, no recomputation, 1F1B, TP with sequence parallelism and full
logits. Rows that contradict themselves (dp * mbs * gas is not gbs) are left out. A configuration that was run several
times counts once, with its best throughput, since a repeat that ran far slower met a fault.
"""

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.validation import nanotron
from ultrascale_jax.plan.hardware import Cluster, find_cluster
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.units import GIB


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured configuration."""

    model: str
    run: Run
    cluster: Cluster
    tokens_per_s_gpu: float | None
    """Measured, or none if the run failed."""
    memory_gib: float | None
    """Measured on the first stage of a pipeline, or none if the run failed."""
    calibration: bool
    """Whether it is of the half on which constants were fitted."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A row with the formulas' prediction."""

    row: Row
    tokens_per_s_gpu: float
    memory_gib: float
    """Memory of the first stage."""
    fits: bool
    impossible: bool
    """Whether not even the memory that is certainly needed fits."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The rows of one model on one number of nodes that ran."""

    model: str
    nodes: int
    rows: int
    spearman: float
    """Rank correlation of predicted and measured throughput."""
    first_choice: float
    """Measured throughput of the fastest by prediction, of those predicted to fit, over the best measured."""


def read(path: Path) -> list[Row]:
    """Read the configurations of a file like tests/data/plan/playbook_runs.csv."""
    best: dict[Run, Row] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            if int(line["dp"]) * int(line["mbs"]) * int(line["gas"]) != int(line["gbs"]):
                continue
            run = nanotron.run_of(line)
            speed, memory = (float(line[name]) for name in ("tok_s_gpu", "mem_gb"))
            row = Row(
                model=line["model"],
                run=run,
                cluster=find_cluster("playbook", "h100", run.num_gpus),
                tokens_per_s_gpu=None if math.isnan(speed) else speed,
                memory_gib=None if math.isnan(memory) else memory,
                calibration=nanotron.is_calibration(line),
            )
            other = best.get(run)
            if other is None or (row.tokens_per_s_gpu or 0) > (other.tokens_per_s_gpu or 0):
                best[run] = row
    return list(best.values())


def predict(row: Row) -> Prediction:
    """Predict throughput and memory of a row."""
    run, usable = row.run, nanotron.usable_bytes(row.cluster.gpu)
    step = nanotron.estimate_with_stalls(run, row.cluster)
    return Prediction(
        row=row,
        tokens_per_s_gpu=step.tokens_per_s_gpu,
        memory_gib=nanotron.reserved_bytes(run, stage=0) / GIB,
        fits=nanotron.reserved_bytes(run) <= usable,
        impossible=nanotron.least_bytes(run) > usable,
    )


def cells(predictions: Iterable[Prediction]) -> list[Cell]:
    """Group the runs that ran by model and nodes, and compare order and first choice with the measurements."""
    groups: dict[tuple[str, int], list[tuple[float, float, bool]]] = {}
    for one in predictions:
        if (measured := one.row.tokens_per_s_gpu) is not None:
            key = (one.row.model, one.row.cluster.nodes)
            groups.setdefault(key, []).append((one.tokens_per_s_gpu, measured, one.fits))
    compared = []
    for (model, nodes), runs in sorted(groups.items()):
        predicted, measured, _ = zip(*runs, strict=True)
        _, chosen = max((guess, speed) for guess, speed, fits in runs if fits)
        cell = Cell(
            model=model,
            nodes=nodes,
            rows=len(runs),
            spearman=statistics.correlation(predicted, measured, method="ranked"),
            first_choice=chosen / max(measured),
        )
        compared.append(cell)
    return compared


def totals(predictions: Sequence[Prediction], compared: Sequence[Cell]) -> list[tuple[str, ...]]:
    """Return, as text, each quantity that is compared, its value over all cells, and its goal."""
    ranks = [cell.spearman for cell in compared]
    choices = [cell.first_choice for cell in compared]
    ran = [(p, p.row.tokens_per_s_gpu) for p in predictions if p.row.tokens_per_s_gpu]
    speed = statistics.median(abs(math.log(p.tokens_per_s_gpu / speed)) for p, speed in ran)
    fitting = [(p, p.row.memory_gib) for p in predictions if p.row.memory_gib]
    memory = statistics.median(abs(p.memory_gib / gib - 1) for p, gib in fitting)
    right = [p.fits for p, _ in ran]
    right += [not p.fits for p in predictions if not p.row.tokens_per_s_gpu and p.impossible]
    return [
        ("throughput, median error", f"{speed:.1%}", ""),
        ("rank correlation of throughput, median cell", f"{statistics.median(ranks):.2f}", ""),
        ("rank correlation of throughput, worst cell", f"{min(ranks):.2f}", "0.90"),
        ("first choice over best, median cell", f"{statistics.median(choices):.1%}", "95%"),
        ("first choice over best, worst cell", f"{min(choices):.1%}", "85%"),
        ("memory, median error", f"{memory:.1%}", "at most 5%"),
        ("fits or not, right", f"{statistics.fmean(right):.1%}", "95%"),
    ]
