"""Read a run's `metrics.jsonl` as it grows, and thin its columns out for a chart.

A chart has some hundred points, a run up to millions of rows. Each point summarizes neighbouring rows: their mean, and
their least and largest value, so that no spike is lost.
"""

import math
import os
from array import array
from pathlib import Path

import numpy as np

from ultrascale_jax.launch.events import is_number, parse_object
from ultrascale_jax.launch.run_files import METRICS

BLOCK = 1 << 24
"""Bytes that are read at once."""


class RunMetrics:
    """The metrics of one run by column, read again whenever `update` is called.

    A field that a row lacks, and one that is no number, is nan there.
    """

    def __init__(self, run_dir: Path):
        self.path = run_dir / METRICS
        self._clear()

    def _clear(self) -> None:
        self.columns: dict[str, array] = {}
        self.length = 0
        self.damaged = 0
        """Lines that hold no row."""
        self._inode: int | None = None
        """Inode of the file: a run that resumes writes a new one."""
        self._offset = 0

    def update(self) -> None:
        """Read the rows that came since the last call; all again if the run cut the file, or wrote it anew."""
        try:
            opened = open(self.path, "rb")
        except OSError:
            return
        with opened as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._clear()
                self._inode = status.st_ino
            file.seek(self._offset)
            while (end := (block := file.read(BLOCK)).rfind(b"\n")) >= 0:
                self._add(block[:end].splitlines())
                self._offset += end + 1
                file.seek(self._offset)

    def _add(self, lines: list[bytes]) -> None:
        rows = [row for line in lines if is_number((row := parse_object(line)).get("step"))]
        self.damaged += len(lines) - len(rows)
        for field in dict.fromkeys(field for row in rows for field in row):
            values = [_float(row.get(field)) for row in rows]
            if field not in self.columns:
                if all(map(math.isnan, values)):
                    continue
                self.columns[field] = array("d", [math.nan]) * self.length
            self.columns[field].extend(values)
        self.length += len(rows)
        for column in self.columns.values():
            column.extend([math.nan] * (self.length - len(column)))

    @property
    def fields(self) -> list[str]:
        """Names of all fields that have numbers, in the order in which a run writes them."""
        return [name for name in self.columns if name not in ("step", "time")]

    def newest(self, field: str) -> float | None:
        """Return the last number of a field."""
        values = reversed(self.columns.get(field, ()))
        return next((float(value) for value in values if math.isfinite(value)), None)

    def thinned(
        self, field: str, x: str, first: float, last: float, points: int
    ) -> list[list[float]]:
        """Return at most `points` of `[x, mean, least, largest]` of a field over `x` from `first` to `last`."""
        if field not in self.columns or x not in self.columns:
            return []
        xs, values = (np.array(self.columns[name]) for name in (x, field))
        shown = (xs >= first) & (xs <= last) & np.isfinite(values)
        xs, values = xs[shown], values[shown]
        if not len(xs):
            return []
        starts = np.unique(np.linspace(0, len(xs), min(points, len(xs)), endpoint=False, dtype=int))
        counts = np.diff([*starts, len(xs)])
        rows = (
            np.add.reduceat(xs, starts) / counts,
            np.add.reduceat(values, starts) / counts,
            np.minimum.reduceat(values, starts),
            np.maximum.reduceat(values, starts),
        )
        return np.stack(rows, axis=1).tolist()

    def step_at(self, time: float) -> float | None:
        """Return the step that had been done at a time."""
        if "time" not in self.columns:
            return None
        index = int(np.searchsorted(np.array(self.columns["time"]), time))
        return self.columns["step"][index - 1] if index else 0.0


def _float(value: object) -> float:
    return float(value) if isinstance(value, bool) or is_number(value) else math.nan
