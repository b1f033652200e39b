"""The formulas beside measured runs of the playbook's benchmark: `python -m scripts.plan validate RUNS.csv`.

Every row is predicted with nanotron's settings (bf16 with fp32 accumulation, no recomputation, 1F1B, TP with sequence
parallelism, full logits) and compared, by model and number of nodes. Constants were fitted on the half `train`.

Runs that others published, in the columns of docs/planning/published_runs.csv, are compared with the estimate for this
project's trainer instead.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from scripts.validation import benchmark, published
from scripts.validation.benchmark import Cell, Prediction
from scripts.validation.nanotron_time import NANOTRON, NanotronProfile
from ultrascale_jax.cli import command_line, output
from ultrascale_jax.config import require

GOALS = (
    ("spearman_least", "rank correlation of throughput, worst cell", 0.9, True),
    ("first_choice_median", "first choice over best, median cell", 0.95, True),
    ("first_choice_least", "first choice over best, worst cell", 0.85, True),
    ("memory_median_error", "memory, median error", 0.05, False),
    ("fits_share", "fits or not, right", 0.95, True),
)
"""Key, words, the goal, and whether more is better."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `python -m scripts.plan validate`."""

    runs: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUNS.csv")]
    """Columns model, nodes, mbs, gas, gbs, dp, pp, tp, zero, tok_s_gpu, mem_gb (nan: failed); or published runs."""
    half: Annotated[Literal["test", "train", "all"], tyro.conf.arg(metavar="NAME")] = "test"
    """The half that no constant was fitted on, the other, or all: test, train, all."""
    calibrate: command_line.Flag = False
    """Fit the constants of the throughput on the half `train` first, and print them."""
    json: command_line.Flag = False
    """Print one JSON object instead of tables."""


def main(argv: list[str]) -> None:
    with command_line.user_errors():
        options = command_line.read(
            Options, argv, prog="python -m scripts.plan validate", description=__doc__ or ""
        )
        if published.is_published(options.runs):
            fix = "no constant is fitted to published runs; leave it out"
            require(not options.calibrate, "calibrate", True, fix)
            require(options.half != "train", "half", options.half, fix)
            published.show(published.read(options.runs), options.json)
            return
        rows, contradictory = benchmark.read(options.runs)
        profile = NANOTRON
        if options.calibrate:
            with output.working("fitting"):
                profile = benchmark.calibrate(row for row in rows if row.calibration)
    chosen = [
        r for r in rows if options.half == "all" or r.calibration == (options.half == "train")
    ]
    predictions = [benchmark.predict(row, profile) for row in chosen]
    found = summarize(predictions)
    found |= {"half": options.half, "left_out": contradictory}
    found["constants"] = {name: getattr(profile, name) for name in benchmark.FITTED}
    if options.json:
        found["predictions"] = [
            {"model": p.row.model, "nodes": p.row.cluster.nodes} | benchmark.beside(p)
            for p in predictions
        ]
        print(output.verb_json("validate", found))
        return
    console = Console()
    if options.calibrate:
        console.print(_constants(profile))
    console.print(_cells([Cell(**cell) for cell in found["cells"]]), _goals(found))
    left = f"{contradictory} rows left out whose dp * mbs * gas is not gbs"
    ran = f"{found['rows']} configurations ({options.half}), {found['ran']} of them ran"
    console.print("; ".join([ran, *([left] if contradictory else [])]))


def summarize(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the cells and their totals."""
    found = benchmark.cells(predictions)
    correlations = [cell.spearman for cell in found if cell.spearman is not None]
    either = [cell.spearman_either for cell in found if cell.spearman_either is not None]
    choices = [cell.first_choice for cell in found if cell.first_choice is not None]
    certain = sum(cell.fits_of for cell in found)
    return {
        "rows": len(predictions),
        "ran": sum(cell.rows for cell in found),
        "spearman_least": min(correlations, default=None),
        "spearman_median": benchmark.median(correlations),
        "spearman_either_least": min(either, default=None),
        "first_choice_median": benchmark.median(choices),
        "first_choice_least": min(choices, default=None),
        "speed_median_error": benchmark.median(p.speed_error for p in predictions),
        "memory_median_error": benchmark.median(p.memory_error for p in predictions),
        "fits_share": sum(cell.fits_right for cell in found) / certain if certain else None,
        "cells": [dataclasses.asdict(cell) for cell in found],
    }


def _cells(found: Sequence[Cell]) -> Table:
    names = ("ran", "ranks", "stalls known", "first choice", "speed error", "memory error", "fits")
    table = Table("model", "nodes", *names)
    for cell in found:
        table.add_row(
            cell.model,
            str(cell.nodes),
            str(cell.rows),
            _number(cell.spearman),
            _number(cell.spearman_either),
            _percent(cell.first_choice),
            _percent(cell.speed_error),
            _percent(cell.memory_error),
            f"{cell.fits_right}/{cell.fits_of}",
        )
    return table


def _goals(found: dict[str, Any]) -> Table:
    table = Table("", "found", "goal", "")
    for key, words, goal, more in GOALS:
        value = found[key]
        show = _number if key.startswith("spearman") else _percent
        word = "" if value is None else "met" if (value >= goal) == more else "missed"
        table.add_row(words, show(value), ("at least " if more else "at most ") + show(goal), word)
    return table


def _constants(profile: NanotronProfile) -> Table:
    table = Table("constant", "fitted", "in use")
    for name in benchmark.FITTED:
        table.add_row(name, f"{getattr(profile, name):.3g}", f"{getattr(NANOTRON, name):.3g}")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
