"""Cut a schedule into segments: runs of ticks that one scan executes. Standard library only."""

from dataclasses import dataclass

from ultrascale_jax.parallel.pipeline.table import Schedule

MOST_SEGMENTS = 8
"""Tables with more runs of like ticks (one operation a tick) become one run: XLA compiles each run's loop by itself."""

ENOUGH = {"embed": 0.3, "head": 0.9, "embed_gradient": 0.3}
"""Share of a segment's ticks from which on all of them run it, masked where it is not needed: a branch, which would
save that work, makes a GPU wait for the host."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Ticks from `start` up to `stop`: one scan, whose every tick runs `kinds` on all ranks."""

    start: int
    stop: int
    kinds: frozenset[str]


def segments(schedule: Schedule) -> tuple[Segment, ...]:
    """Return runs of ticks with equal kinds and head; if too many, with equal kinds; if still too many, one run."""
    kinds = [frozenset(kind for cell in tick for kind in cell) for tick in schedule.ticks]
    last = schedule.num_stages - 1
    head = [any(cell.get("F", (0, -1))[1] == last for cell in tick) for tick in schedule.ticks]
    for marks in (list(zip(kinds, head, strict=True)), kinds):
        stops = [t for t in range(1, len(kinds)) if marks[t] != marks[t - 1]] + [len(kinds)]
        if len(stops) <= MOST_SEGMENTS:
            break
    else:
        stops, kinds = [len(kinds)], [frozenset().union(*kinds)] * len(kinds)
    starts = [0, *stops[:-1]]
    return tuple(
        Segment(start=start, stop=stop, kinds=kinds[start])
        for start, stop in zip(starts, stops, strict=True)
    )
