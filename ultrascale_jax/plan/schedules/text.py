"""Write a pipeline schedule as text for people, and as a file that `pp.schedule` reads."""

import csv
from collections.abc import Mapping
from pathlib import Path

from ultrascale_jax.parallel.pipeline.table import Schedule
from ultrascale_jax.units import counted


def as_text(schedule: Schedule) -> str:
    """Return text: ranks down, ticks across, microbatches in the cells (`3.1`: microbatch 3, chunk 1)."""

    def label(kind: str, microbatch: int, stage: int) -> str:
        chunk = f".{schedule.chunk_of(stage)}" if schedule.virtual > 1 else ""
        return f"{kind}{microbatch}{chunk}"

    fused = any(len(cell) > 1 for row in schedule.ticks for cell in row)
    width = 1 + max(len(label("", m, s)) for _, _, _, m, s in schedule.ops()) + (not fused)
    lines = []
    for rank in range(schedule.ranks):
        row = [ticks[rank] for ticks in schedule.ticks]
        for kinds in schedule.kinds if fused else (schedule.kinds,):
            cells = (
                next((label("" if fused else k, *c[k]) for k in kinds if k in c), ".") for c in row
            )
            head = f"{f'rank {rank}' if kinds[0] == 'F' else '':8}{kinds if fused else ''}"
            lines.append(head + "".join(cell.rjust(width) for cell in cells))
    return "\n".join(lines)


def describe(schedule: Schedule) -> str:
    """Return the schedule's name and sizes in a line."""
    sizes = f"{schedule.ranks} ranks x {counted(schedule.virtual, 'stage')}"
    return f"{schedule.name}: {sizes}, {counted(schedule.microbatches, 'micro-batch', 'micro-batches')}"


def bubble_text(bubbles: Mapping[str, float | None]) -> str:
    """Write the bubbles of `measures.bubbles` in a line."""
    names = {"formula": "formula", "lockstep": "lock step", "dependencies": "true dependencies"}
    values = {names[name]: share for name, share in bubbles.items() if share is not None}
    return ", ".join(f"{name} {share:.1%}" for name, share in values.items())


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Write `schedule` as a file that `parallel/pipeline/table_csv.py: read_csv` reads."""
    rows: list[list[list[str]]] = [[[] for _ in schedule.ticks] for _ in range(schedule.ranks)]
    for tick, rank, kind, microbatch, stage in schedule.ops():
        rows[rank][tick].append(schedule.entry(kind, microbatch, stage))
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(map(" ".join, row) for row in rows)
