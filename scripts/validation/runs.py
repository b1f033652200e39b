"""Runs that others measured, read from CSV files; an error names line and column."""

import csv
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ultrascale_jax.config import UserError, require
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.workload import Run


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured run."""

    model: str
    run: Run
    cluster: Cluster
    tokens_per_s_gpu: float | None
    """Measured, or none if the run failed."""
    memory_gib: float | None
    """Measured, of a pipeline on the first stage; none if it is not known."""
    calibration: bool = False
    """Whether it is of the half on which constants are fitted."""
    software: str = "nanotron"
    source: str = ""
    assumed: str = ""
    """Assumptions where the source is silent."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A row with the formulas' prediction."""

    row: Row
    tokens_per_s_gpu: float
    memory_gib: float
    """Memory of the first stage."""
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
            rows = [(f"{path}, line {reader.line_num}, ", line) for line in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"runs={str(path)!r}: is not a CSV file: {error}") from None
    require(bool(rows), "runs", str(path), "the file has no rows")
    for where, line in rows:
        fix = "more values than columns; quote those with a comma"
        require(None not in line, where + "values", ",".join(line.get(None, [])), fix)
    return rows


def count(field: str, text: str, least: int = 1, most: int = 10**7) -> int:
    """Parse an integer from `least` to `most`; a `UserError` names `field`."""
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


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if there are none."""
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None
