"""Write a pipeline schedule as text for people, and as a file that `pp.schedule` reads."""

import csv
from pathlib import Path

from ultrascale_jax.parallel.pipeline.table import Schedule


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


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Write `schedule` as a file that `parallel/pipeline/table_csv.py: read_csv` reads."""
    rows: list[list[list[str]]] = [[[] for _ in schedule.ticks] for _ in range(schedule.ranks)]
    for tick, rank, kind, microbatch, stage in schedule.ops():
        rows[rank][tick].append(schedule.entry(kind, microbatch, stage))
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(map(" ".join, row) for row in rows)
