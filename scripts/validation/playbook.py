"""Compare the formulas with the playbook's benchmark: `python -m scripts.validation.playbook RUNS.csv [--half NAME]`.

Every row is predicted with nanotron's settings (bf16 with fp32 accumulation, no recomputation, 1F1B, TP with sequence
parallelism, full logits) and compared, by model and number of nodes. Constants were fitted on the half `train`
(`nanotron.is_calibration`); the other is the test. Rows that contradict themselves (dp * mbs * gas is not gbs) are left
out. A configuration that was run several times counts once, with its best throughput, since a repeat that ran far
slower met a fault.
"""

import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.table import Table

from scripts.validation import nanotron
from scripts.validation.runs import Prediction, Row, count, lines, measured, median
from ultrascale_jax.cli import command_line, output
from ultrascale_jax.config import UserError, require
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.units import GIB

COUNTS = ("nodes", "mbs", "gas", "gbs", "dp", "pp", "tp", "zero")
MEASURED = ("tok_s_gpu", "mem_gb")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of this comparison."""

    runs: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUNS.csv")]
    """Columns model, nodes, mbs, gas, gbs, dp, pp, tp, zero, tok_s_gpu, mem_gb (nan: failed)."""
    half: Annotated[Literal["test", "train", "all"], tyro.conf.arg(metavar="NAME")] = "test"
    """The half that no constant was fitted on, the other, or all: test, train, all."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The rows of one model on one number of nodes."""

    model: str
    nodes: int
    rows: int
    spearman: float | None
    """Rank correlation of predicted and measured throughput; none with fewer than three rows."""
    first_choice: float | None
    """Measured throughput of the fastest by prediction, of those predicted to fit, over the best measured."""
    speed_error: float | None
    """Median of |log(predicted / measured)| of the throughput."""
    memory_error: float | None
    """Median relative error."""
    fits_right: int
    """Number of rows whose fit is predicted, of `fits_of` that ran or cannot possibly fit."""
    fits_of: int


def read(path: Path) -> tuple[list[Row], int]:
    """Read the configurations of a CSV file; count rows that contradict themselves. `UserError` has line and column."""
    best: dict[Run, Row] = {}
    contradictory = 0
    for where, line in lines(path, ("model", *COUNTS, *MEASURED)):
        row = _row(where, line)
        if row is None:
            contradictory += 1
            continue
        other = best.get(row.run)
        if other is None or (row.tokens_per_s_gpu or 0) > (other.tokens_per_s_gpu or 0):
            best[row.run] = row
    return list(best.values()), contradictory


def _row(where: str, line: dict[str, str]) -> Row | None:
    most = {"zero": (0, 1)}
    counts = {name: count(where + name, line[name], *most.get(name, ())) for name in COUNTS}
    speed, memory = (measured(where + name, line[name]) for name in MEASURED)
    fix = f"the models are {', '.join(nanotron.SHAPES)}"
    require(line["model"] in nanotron.SHAPES, where + "model", line["model"], fix)
    if counts["dp"] * counts["mbs"] * counts["gas"] != counts["gbs"]:
        return None
    try:
        run = nanotron.run_of(line)
    except UserError as error:
        raise UserError(where + str(error)) from None
    cluster = find_cluster("playbook", "h100", run.num_gpus)
    fix = f"dp * pp * tp is {run.num_gpus} GPUs, {cluster.nodes} nodes of {cluster.gpus_per_node}"
    require(counts["nodes"] == cluster.nodes, where + "nodes", counts["nodes"], fix)
    return Row(
        model=line["model"],
        run=run,
        cluster=cluster,
        tokens_per_s_gpu=speed,
        memory_gib=memory,
        calibration=nanotron.is_calibration(line),
    )


def predict(row: Row, constants: nanotron.Constants = nanotron.NANOTRON) -> Prediction:
    """Predict throughput and memory of a row."""
    run, usable = row.run, nanotron.usable_bytes(row.cluster.gpu)
    step = nanotron.estimate_with_stalls(run, row.cluster, constants)
    return Prediction(
        row=row,
        tokens_per_s_gpu=step.tokens_per_s_gpu,
        memory_gib=nanotron.nanotron_breakdown(run, stage=0).peak_bytes / GIB,
        fits=nanotron.nanotron_breakdown(run).peak_bytes <= usable,
        impossible=nanotron.least_bytes(run) > usable,
    )


def cells(predictions: Iterable[Prediction]) -> list[Cell]:
    """Group predictions by model and nodes, and compare them with the measurements."""
    groups: dict[tuple[str, int], list[Prediction]] = {}
    for one in predictions:
        groups.setdefault((one.row.model, one.row.cluster.nodes), []).append(one)
    order = list(nanotron.SHAPES)
    keys = sorted(groups, key=lambda key: (order.index(key[0]), key[1]))
    return [_cell(*key, groups[key]) for key in keys]


def _cell(model: str, nodes: int, group: list[Prediction]) -> Cell:
    ran = [(p, p.row.tokens_per_s_gpu) for p in group if p.row.tokens_per_s_gpu is not None]
    speeds = [speed for _, speed in ran]
    guesses = [p.tokens_per_s_gpu for p, _ in ran]
    fitting = [(p.tokens_per_s_gpu, speed) for p, speed in ran if p.fits]
    certain = [p for p in group if p.row.tokens_per_s_gpu is not None or p.impossible]
    return Cell(
        model=model,
        nodes=nodes,
        rows=len(ran),
        spearman=spearman(guesses, speeds) if len(ran) > 2 else None,
        first_choice=max(fitting)[1] / max(speeds) if fitting else None,
        speed_error=median(p.speed_error for p in group),
        memory_error=median(p.memory_error for p in group),
        fits_right=sum(p.fits == (p.row.tokens_per_s_gpu is not None) for p in certain),
        fits_of=len(certain),
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the rank correlation; equal values share the mean of their ranks. 0 if one of both is constant."""
    if len(set(first)) == 1 or len(set(second)) == 1:
        return 0.0
    return statistics.correlation(first, second, method="ranked")


def totals(predictions: Sequence[Prediction], compared: Sequence[Cell]) -> list[tuple[str, ...]]:
    """Return what is compared, the figure over all cells, and its goal, as text."""
    ranks = [cell.spearman for cell in compared if cell.spearman is not None]
    choices = [cell.first_choice for cell in compared if cell.first_choice is not None]
    certain = sum(cell.fits_of for cell in compared)
    fits = sum(cell.fits_right for cell in compared) / certain if certain else None
    speed = median(p.speed_error for p in predictions)
    memory = median(p.memory_error for p in predictions)
    return [
        ("throughput, median error", _percent(speed), ""),
        ("rank correlation of throughput, median cell", _number(median(ranks)), ""),
        ("rank correlation of throughput, worst cell", _number(min(ranks, default=None)), "0.90"),
        ("first choice over best, median cell", _percent(median(choices)), "95%"),
        ("first choice over best, worst cell", _percent(min(choices, default=None)), "85%"),
        ("memory, median error", _percent(memory), "at most 5%"),
        ("fits or not, right", _percent(fits), "95%"),
    ]


def _table(compared: Sequence[Cell]) -> Table:
    names = ("ran", "ranks", "first choice", "speed error", "memory error", "fits")
    table = output.table(("model", "nodes"), names)
    for cell in compared:
        table.add_row(
            *(cell.model, str(cell.nodes), str(cell.rows), _number(cell.spearman)),
            *map(_percent, (cell.first_choice, cell.speed_error, cell.memory_error)),
            f"{cell.fits_right}/{cell.fits_of}",
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def main(argv: Sequence[str]) -> None:
    with command_line.user_errors():
        prog = "python -m scripts.validation.playbook"
        options = command_line.read(Options, argv, prog=prog, description=__doc__ or "")
        rows, contradictory = read(options.runs)
    halves = {"test": (False,), "train": (True,), "all": (False, True)}[options.half]
    predictions = [predict(row) for row in rows if row.calibration in halves]
    compared = cells(predictions)
    table = output.table(("", "found", "goal"), ())
    for row in totals(predictions, compared):
        table.add_row(*row)
    console = output.console(120)
    console.print(_table(compared), table, sep="\n")
    ran = sum(cell.rows for cell in compared)
    left = (
        f"; {contradictory} rows left out whose dp * mbs * gas is not gbs" if contradictory else ""
    )
    console.print(f"{len(predictions)} configurations ({options.half}), {ran} of them ran{left}")


if __name__ == "__main__":
    main(sys.argv[1:])
