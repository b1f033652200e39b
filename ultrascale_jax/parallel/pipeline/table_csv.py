"""Read schedules from CSV: one row a rank, one column a tick, in PyTorch's notation.

    0F0,0F1,,0B0,,0B1
    ,1F0,1F1 1B0,1B1,,

`2F5` is stage 2, forward, microbatch 5; `B` is a full backward, `I` an input gradient, `W` a weight gradient. Several
operations of one tick are joined by a space and run in the order F, I or B, W; an empty cell is idle. Empty lines at
the end are no rows; a row of empty cells is a rank without a stage, which is refused. Torch writes one operation a cell
(`_PipelineSchedule._load_csv`), so its compute-only files can be read.
"""

import csv
import dataclasses
import io
import math
import re
from pathlib import Path
from typing import NamedTuple

from ultrascale_jax.config import UserError, require
from ultrascale_jax.parallel.pipeline.table import Placement, Schedule, ScheduleError
from ultrascale_jax.storage.foreign import read_foreign

MOST_CELLS = 1_000_000
"""Cells of the largest table: 64 ranks times 512 micro-batches through two stages of each take a quarter of it."""


class _Entry(NamedTuple):
    rank: int
    tick: int
    kind: str
    microbatch: int
    stage: int

    @property
    def text(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def refuse(self, why: str) -> ScheduleError:
        return ScheduleError(why, self.rank, self.tick, self.text)


def read_csv(path: str | Path) -> Schedule:
    """Return the schedule of a file, checked.

    Ranks, microbatches, stages and their placement are those that the file uses. Raises `UserError`, which names the
    row, the column, the entry and the reason, for a file that is no schedule or cannot be run.
    """
    content = read_foreign(Path(path), name="pp.schedule")
    try:
        text = content.decode("utf-8-sig")
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"pp.schedule={str(path)!r}: cannot be read: {error}") from None
    while rows and len(rows[-1]) <= 1 and not "".join(rows[-1]).strip():
        rows.pop()
    size = len(rows), max(map(len, rows), default=0)
    fix = f"has {size[0]} rows (ranks) of up to {size[1]} columns (ticks), more than {MOST_CELLS:,} cells"
    require(math.prod(size) <= MOST_CELLS, "pp.schedule", str(path), fix)
    try:
        entries = [
            entry
            for rank, row in enumerate(rows)
            for tick, cell in enumerate(row)
            for entry in _parse(rank, tick, cell)
        ]
        return _table(Path(path).name, len(rows), entries).check()
    except ScheduleError as error:
        place = [f"row {error.rank + 1} (rank {error.rank})"] if error.rank is not None else []
        if error.rank is not None and error.tick is not None:
            place.append(f"column {error.tick + 1} (tick {error.tick})")
            place.append(f"cell {rows[error.rank][error.tick].strip()!r}")
        if error.entry is not None:
            place.append(error.entry)
        where = f"{', '.join(place)}: " if place else ""
        raise UserError(f"pp.schedule={str(path)!r}: {where}{error.why}") from None


def _parse(rank: int, tick: int, cell: str) -> list[_Entry]:
    entries = []
    for word in cell.split():
        match = re.fullmatch(r"([0-9]{1,6})([FBIW])([0-9]{1,6})", word)
        if match is None:
            why = f"{word!r} is no operation: write stage, F, B, I or W, and microbatch, as in 2F5"
            raise ScheduleError(why, rank, tick)
        entries.append(_Entry(rank, tick, match[2], int(match[3]), int(match[1])))
    return entries


def _table(name: str, ranks: int, entries: list[_Entry]) -> Schedule:
    if not entries:
        raise ScheduleError("there is no operation in it")
    idle = min(set(range(ranks)) - {entry.rank for entry in entries}, default=None)
    if idle is not None:
        raise ScheduleError("has no operation; give the rank a stage, or take the row out", idle)
    split = any(entry.kind in "IW" for entry in entries)
    stages, microbatches = _count(entries, "stage"), _count(entries, "microbatch")
    if stages % ranks:
        raise ScheduleError(f"{stages} stages cannot be spread evenly over {ranks} rows (ranks)")
    table = Schedule(
        name=name, ranks=ranks, virtual=stages // ranks, microbatches=microbatches, split=split
    )
    table = dataclasses.replace(table, placement=_placement(table, entries))
    ticks: list[list[dict[str, tuple[int, int]]]] = [
        [{} for _ in range(ranks)] for _ in range(1 + max(entry.tick for entry in entries))
    ]
    for entry in entries:
        cell = ticks[entry.tick][entry.rank]
        # In a table that splits, a full backward is both of its halves in one tick.
        kinds = {"I": "B", "B": "BW" if split else "B"}.get(entry.kind, entry.kind)
        for kind in kinds:
            if kind in cell:
                other = table.entry(kind, *cell[kind])
                raise entry.refuse(f"a rank runs one operation of a kind in a tick, here {other}")
            cell[kind] = (entry.microbatch, entry.stage)
    return table.with_ticks(ticks)


def _count(entries: list[_Entry], field: str) -> int:
    """Count the stages or microbatches; refuse numbers that skip some."""
    used = {getattr(entry, field) for entry in entries}
    missing = next(n for n in range(len(used) + 1) if n not in used)
    beyond = next((entry for entry in entries if getattr(entry, field) > missing), None)
    if beyond:
        raise beyond.refuse(
            f"there is no {field} {missing} anywhere; they count from 0 without gaps"
        )
    return missing


def _placement(table: Schedule, entries: list[_Entry]) -> Placement:
    """Return the placement that fits all entries; else refuse the first misfit of the one that fits best."""
    placements: tuple[Placement, ...] = ("loop", "v")
    tables = [dataclasses.replace(table, placement=placement) for placement in placements]
    misfits = [[e for e in entries if e.rank != t.rank_of(e.stage)] for t in tables]
    best = min(range(2), key=lambda n: len(misfits[n]))
    if misfits[best]:
        entry = misfits[best][0]
        loop, v = (t.rank_of(entry.stage) for t in tables)
        where = f"rank {loop}" if loop == v else f"rank {loop} in a loop and on rank {v} in a V"
        raise entry.refuse(f"stage {entry.stage} is on {where}")
    return placements[best]
