"""Measure a pipeline schedule: its bubble, the time of each operation, and the values that a rank keeps.

Costs `f`, `b`, `w` are the times of a forward pass, an input gradient and a weight gradient of one micro-batch through
all stages of a rank, in any unit; a backward pass that is not split takes `b + w`.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ultrascale_jax.parallel.pipeline.segments import segments
from ultrascale_jax.parallel.pipeline.table import KINDS, Schedule

type Runtime = Literal["lockstep", "dependencies"]
"""`lockstep`: the executor, in which every rank pays for each kind of operation that a tick runs on any rank;
`dependencies`: each rank waits for its data alone, as separate programs would."""


class Op(NamedTuple):
    """One operation of a table and when it runs, in units of the costs it was timed with."""

    rank: int
    tick: int
    kind: str
    microbatch: int
    stage: int
    start: float
    end: float


def bubble(
    schedule: Schedule,
    f: float = 1.0,
    b: float = 1.0,
    w: float = 1.0,
    runtime: Runtime = "lockstep",
) -> float:
    """Return idle time over ideal time, `step / ideal - 1`."""
    if runtime == "lockstep":
        cost = _costs(schedule, f, b, w)
        step = math.fsum(cost[kind] for kinds in kinds_by_tick(schedule) for kind in kinds)
    else:
        step = max((op.end for op in timeline(schedule, f, b, w, runtime)), default=0.0)
    return step / (schedule.microbatches * (f if schedule.forward else f + b + w)) - 1


def kinds_by_tick(schedule: Schedule) -> list[frozenset[str]]:
    """Return the kinds of operation that the executor runs in each tick, on all ranks.

    These are the kinds of the tick, or of all ticks where a table has too many runs of like ticks.
    """
    return [s.kinds for s in segments(schedule) for _ in range(s.start, s.stop)]


def timeline(
    schedule: Schedule,
    f: float = 1.0,
    b: float = 1.0,
    w: float = 1.0,
    runtime: Runtime = "dependencies",
) -> list[Op]:
    """Return start and end of every operation."""
    cost = _costs(schedule, f, b, w)
    return list((_in_lock_step if runtime == "lockstep" else _as_data_comes)(schedule, cost))


def _costs(schedule: Schedule, f: float, b: float, w: float) -> dict[str, float]:
    """Return the time of one operation of each kind, through one stage."""
    full = b if schedule.split else b + w
    return {"F": f / schedule.virtual, "B": full / schedule.virtual, "W": w / schedule.virtual}


def _in_lock_step(schedule: Schedule, cost: Mapping[str, float]) -> Iterator[Op]:
    """Yield the operations of each tick one kind after the other, with room for all kinds that it runs."""
    now = 0.0
    for tick, (row, kinds) in enumerate(zip(schedule.ticks, kinds_by_tick(schedule), strict=True)):
        for kind in KINDS:
            if kind in kinds:
                for rank, cell in enumerate(row):
                    if kind in cell:
                        yield Op(rank, tick, kind, *cell[kind], now, now + cost[kind])
                now += cost[kind]


def _as_data_comes(schedule: Schedule, cost: Mapping[str, float]) -> Iterator[Op]:
    """Yield each operation as early as its rank is free and its inputs exist."""
    free = [0.0] * schedule.ranks
    end: dict[tuple[str, int, int], float] = {}
    for tick, rank, kind, microbatch, stage in schedule.ops():
        inputs = [end[need, microbatch, at] for need, at in schedule.needs(kind, stage)]
        start = max([free[rank], *inputs])
        free[rank] = end[kind, microbatch, stage] = start + cost[kind]
        yield Op(rank, tick, kind, microbatch, stage, start, free[rank])


def bubbles(
    schedule: Schedule, f: float = 1.0, b: float = 1.0, w: float = 1.0
) -> dict[str, float | None]:
    """Return the bubble by formula, None if there is none, in lock step, and with true dependencies."""
    return {
        "formula": formula(schedule),
        "lockstep": bubble(schedule, f, b, w),
        "dependencies": bubble(schedule, f, b, w, "dependencies"),
    }


def formula(schedule: Schedule) -> float | None:
    """Return the bubble at f = b = w in closed form, for `dependencies`; None if there is none.

    `afab`, `1f1b`, `interleaved`, `zb_h1` and `dualpipe_v` have their papers' forms. `zb_uniform` is ours and counts
    lock step. `zb_v` is ours too and counts from the first tick: its paper counts from each rank's first operation and
    has no bubble then. `zb_h1` reaches its form from m = p on, `zb_v` from m = 2 p - 1 on. `dualpipe_v` counts an F and
    a B that share a tick as one operation; one after the other, as `dependencies` times them, they idle half as long.
    """
    p, m, v = schedule.ranks, schedule.microbatches, schedule.virtual
    return {
        "afab": (p - 1) / m,
        "1f1b": (p - 1) / m,
        "interleaved": (p - 1) / (v * m),
        "zb_uniform": 2 * (p - 1) / (3 * v * m),
        "zb_h1": (p - 1) / (3 * m),
        "zb_v": (p - 1) / (6 * m),
        "dualpipe_v": (p - 1) / (3 * m),
    }.get(schedule.name)


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """Most values that each rank holds at once, by kind: the slots of the executor's ring buffers."""

    inputs: tuple[int, ...]
    """Inputs of stages, until the forward pass has read them."""
    stashed_inputs: tuple[int, ...]
    """The same until the backward pass has, as with `pp.stash=input`."""
    gradients: tuple[int, ...]
    """Gradients of the outputs of stages."""
    in_flight: tuple[int, ...]
    """Pairs (microbatch, chunk) that have run F and wait for B."""
    w_queue: tuple[int, ...]
    """Pairs (microbatch, chunk) that have run B and wait for W."""


def holdings(schedule: Schedule) -> Holdings:
    """Count the values that each rank holds, from the ticks that write them and read them last.

    `parallel/pipeline/program.py` keeps a slot for each through both ticks. A stage's input comes from the stage before
    or the embedding, the gradient of its output from the next stage or the head.
    """
    ticks = _ticks(schedule)
    forward, backward, last = ticks["F"], ticks["B"], schedule.num_stages - 1
    came = {(i, s): forward[i, s - 1] if s else tick for (i, s), tick in forward.items()}
    returned = {(i, s): forward[i, s] if s == last else backward[i, s + 1] for i, s in backward}
    return Holdings(
        inputs=_most(schedule, came, forward),
        stashed_inputs=_most(schedule, came, backward),
        gradients=_most(schedule, returned, backward),
        in_flight=_most(schedule, forward, backward),
        w_queue=_most(schedule, backward, ticks["W"]),
    )


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return each rank's peak number of (microbatch, chunk) that have run F and wait for B."""
    ticks = _ticks(schedule)
    return _most(schedule, ticks["F"], ticks["B"])


def w_queue(schedule: Schedule) -> tuple[int, ...]:
    """Return each rank's peak number of (microbatch, chunk) that have run B and wait for W."""
    ticks = _ticks(schedule)
    return _most(schedule, ticks["B"], ticks["W"])


def held(schedule: Schedule) -> tuple[int, ...]:
    """Return each rank's peak number of (microbatch, chunk) between F and the last operation on them."""
    ticks = _ticks(schedule)
    return _most(schedule, ticks["F"], ticks["W" if schedule.split else "B"])


type Ticks = dict[tuple[int, int], int]
"""(microbatch, stage) to a tick."""


def _ticks(schedule: Schedule) -> dict[str, Ticks]:
    """Return the tick of each operation, by kind."""
    ticks: dict[str, Ticks] = {kind: {} for kind in KINDS}
    for tick, row in enumerate(schedule.ticks):
        for cell in row:
            for kind, value in cell.items():
                ticks[kind][value] = tick
    return ticks


def _most(schedule: Schedule, begins: Ticks, ends: Ticks) -> tuple[int, ...]:
    """Count the values that each rank has at most at once, from one tick to another and in both."""
    changes = [[0] * (len(schedule.ticks) + 1) for _ in range(schedule.ranks)]
    of_stage = [changes[schedule.rank_of(stage)] for stage in range(schedule.num_stages)]
    for value, end in ends.items():
        of_rank = of_stage[value[1]]
        of_rank[begins[value]] += 1
        of_rank[end + 1] -= 1
    return tuple(max(itertools.accumulate(of_rank)) for of_rank in changes)
