"""The formulas beside the playbook's benchmark: each run predicted with nanotron's settings, and the constants' fit.

The rows' halves are `nanotron.is_calibration`: constants are fitted on one, the other is the test. Left out are rows
that contradict themselves (dp * mbs * gas is not gbs); a configuration that was run several times counts once, with
its best throughput, since a repeat that ran far slower met a fault.
"""

import csv
import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from scripts.validation import nanotron
from scripts.validation.nanotron_time import (
    NANOTRON,
    NanotronProfile,
    NanotronStep,
    estimate_with_stalls,
    stall_s,
)
from ultrascale_jax.config import UserError, require
from ultrascale_jax.plan.hardware import Cluster, find_cluster
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.units import GIB

COUNTS = ("nodes", "mbs", "gas", "gbs", "dp", "pp", "tp", "zero")
MEASURED = ("tok_s_gpu", "mem_gb")

FITTED = (
    *("matmul", "logit_bytes", "host_s", "host_rank_s", "tensor", "hide"),
    *("reduce", "gather", "send_s", "step_s", "stall_s", "network_stall_s"),
)
"""Constants of `NanotronProfile` that `calibrate` fits."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured run, of the benchmark or of those that others published (`published.py`)."""

    model: str
    run: Run
    cluster: Cluster
    tokens_per_s_gpu: float | None
    """Measured, or none if the run failed."""
    memory_gib: float | None
    """Measured, of a pipeline on the first stage; none if it is not known."""
    calibration: bool = False
    """Of the half on which constants are fitted."""
    software: str = "nanotron"
    source: str = ""
    assumed: str = ""
    """Assumptions where the source is silent."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A row with what the formulas say."""

    row: Row
    tokens_per_s_gpu: float
    memory_gib: float
    """Of the first stage."""
    either: float = math.nan
    """Tokens/s/GPU of a step that ran or of one that stalled, whichever is nearer to the measured: no prediction."""
    fits: bool = True
    impossible: bool = False
    """Whether not even what is certainly needed fits."""

    @property
    def ratio(self) -> float:
        """Throughput predicted over measured; nan of a run that failed."""
        return self.tokens_per_s_gpu / (self.row.tokens_per_s_gpu or math.nan)

    @property
    def speed_error(self) -> float | None:
        """|log(predicted / measured)| of the throughput; none of a run that failed."""
        return None if self.row.tokens_per_s_gpu is None else abs(math.log(self.ratio))

    @property
    def memory_error(self) -> float | None:
        """Relative error; none where nothing was measured."""
        measured = self.row.memory_gib
        return None if measured is None else abs(self.memory_gib / measured - 1)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The rows of one model on one number of nodes."""

    model: str
    nodes: int
    rows: int
    spearman: float | None
    """Rank correlation of predicted and measured throughput; none with fewer than three rows."""
    spearman_either: float | None
    """The same if it were known which rows stalled."""
    first_choice: float | None
    """Measured throughput of the fastest by prediction, of those predicted to fit, over the best measured."""
    speed_error: float | None
    """Median of |log(predicted / measured)| of the throughput."""
    memory_error: float | None
    """Median relative error."""
    fits_right: int
    """Of `fits_of` rows that ran or cannot possibly fit, those whose fit is predicted."""
    fits_of: int


def read(path: Path) -> tuple[list[Row], int]:
    """Read the configurations of a CSV file; count rows that contradict themselves. `UserError` has line and column."""
    found: dict[Run, Row] = {}
    contradictory = 0
    for where, line in lines(path, ("model", *COUNTS, *MEASURED)):
        row = _row(where, line)
        if row is None:
            contradictory += 1
            continue
        other = found.get(row.run)
        if other is None or (row.tokens_per_s_gpu or 0) > (other.tokens_per_s_gpu or 0):
            found[row.run] = row
    return list(found.values()), contradictory


def _row(where: str, line: dict[str, str]) -> Row | None:
    counts = {
        name: count(where + name, line[name], 0, 1)
        if name == "zero"
        else count(where + name, line[name])
        for name in COUNTS
    }
    speed, memory = (measured(where + name, line[name]) for name in MEASURED)
    models = ", ".join(nanotron.SHAPES)
    require(
        line["model"] in nanotron.SHAPES, where + "model", line["model"], f"the models are {models}"
    )
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


def lines(path: Path, columns: Iterable[str]) -> list[tuple[str, dict[str, str]]]:
    """Return the rows of a CSV file with `columns`, each after its place as errors name it: `FILE, line N, `.

    Raises `UserError` without the file, a column or rows, or for a row longer than the header.
    """
    require(path.is_file(), "runs", str(path), "there is no such file")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restval="")
            missing = [name for name in columns if name not in (reader.fieldnames or [])]
            fix = f"the file has no column {', '.join(missing)}"
            require(not missing, "runs", str(path), fix)
            found = [(f"{path}, line {reader.line_num}, ", line) for line in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"runs={str(path)!r}: is not a CSV file: {error}") from None
    require(bool(found), "runs", str(path), "the file has no rows")
    for where, line in found:
        fix = "more values than columns; quote those with a comma"
        require(None not in line, where + "values", ",".join(line.get(None, [])), fix)
    return found


def count(field: str, text: str, least: int = 1, most: int = 10**7) -> int:
    """Parse a whole number from `least` to `most`; a `UserError` names `field`."""
    few = " or ".join(str(n) for n in range(least, most + 1)) if most < 10 else ""
    right = text.isdecimal() and least <= int(text) <= most
    require(right, field, text, f"must be {few or f'a number, {least} or more'}")
    return int(text)


def measured(field: str, text: str) -> float | None:
    """Parse a positive number, None for nan or nothing; a `UserError` names `field`."""
    try:
        value = float(text or "nan")
    except ValueError:
        value = -1.0
    right = math.isnan(value) or 0 < value < math.inf
    require(right, field, text, "must be a positive number, or nan where there is none")
    return None if math.isnan(value) else value


def predict(row: Row, profile: NanotronProfile = NANOTRON) -> Prediction:
    """Predict throughput and memory of a row."""
    run, usable = row.run, nanotron.usable_bytes(row.cluster.gpu)
    first = nanotron.nanotron_breakdown(run, stage=0).peak_bytes
    seconds = step_seconds(row, profile)
    measured = row.tokens_per_s_gpu or 1.0
    speeds = [run.step_tokens / run.num_gpus / s for s in seconds]
    return Prediction(
        row=row,
        tokens_per_s_gpu=estimate_with_stalls(run, row.cluster, profile).tokens_per_s_gpu,
        either=min(speeds, key=lambda speed: abs(math.log(speed / measured))),
        memory_gib=first / GIB,
        fits=nanotron.nanotron_breakdown(run).peak_bytes <= usable,
        impossible=nanotron.least_bytes(run) > usable,
    )


def step_seconds(row: Row, profile: NanotronProfile) -> tuple[float, ...]:
    """Return the seconds of a step that ran and, for pipelines and on 64 nodes, of one that stalled."""
    seconds = sum(NanotronStep(row.run, row.cluster, profile).parts().values())
    if row.run.mesh.pp == 1 and row.cluster.nodes < 64:
        return (seconds,)
    return seconds, seconds + stall_s(row.run, profile)


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
        spearman_either=spearman([p.either for p, _ in ran], speeds) if len(ran) > 2 else None,
        first_choice=max(fitting)[1] / max(speeds) if fitting else None,
        speed_error=median(p.speed_error for p in group),
        memory_error=median(p.memory_error for p in group),
        fits_right=sum(p.fits == (p.row.tokens_per_s_gpu is not None) for p in certain),
        fits_of=len(certain),
    )


def beside(one: Prediction) -> dict[str, Any]:
    """Return throughput and GiB of one GPU by a `Prediction`, beside the measured, null where nothing was."""
    return {
        "label": one.row.run.label,
        "tokens_per_s_gpu": one.tokens_per_s_gpu,
        "memory_gib": one.memory_gib,
        "measured_tokens_per_s_gpu": one.row.tokens_per_s_gpu,
        "measured_memory_gib": one.row.memory_gib,
    }


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if there are none."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the rank correlation; equal values share the mean of their ranks. 0 if one of both is constant."""
    if len(set(first)) == 1 or len(set(second)) == 1:
        return 0.0
    return statistics.correlation(first, second, method="ranked")


def calibrate(rows: Iterable[Row], start: NanotronProfile = NANOTRON) -> NanotronProfile:
    """Fit the constants `FITTED` to the measured step times of `rows`, beginning from `start`.

    Least squares of the logarithms of step times over those of constants, the rows weighted by 1 / sqrt(1 + (error /
    10%)^2): the benchmark has faults. Where steps stalled, the nearer prediction counts (`either`). A weak prior (30%
    for an error of 10%) holds the constants that the rows say little of.
    """
    timed = [
        (row, row.run.step_tokens / row.tokens_per_s_gpu / row.run.num_gpus)
        for row in rows
        if row.tokens_per_s_gpu is not None
    ]
    require(bool(timed), "runs", len(timed), "no row was measured")
    prior = np.log([getattr(start, name) for name in FITTED])

    def profile(x) -> NanotronProfile:
        values: dict[str, Any] = dict(zip(FITTED, map(float, np.exp(x)), strict=True))
        return dataclasses.replace(start, **values)

    def errors(x):
        found = []
        for row, seconds in timed:
            predicted = step_seconds(row, profile(x))
            found.append(min((math.log(s / seconds) for s in predicted), key=abs))
        return np.array([*found, *(0.3 * (x - prior))])

    return profile(least_squares(errors, prior, loss="soft_l1", f_scale=0.1).x)
