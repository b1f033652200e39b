"""Schedule by list scheduling: make a table for measured costs of F, B and W and a limit on memory.

Several rules make tables, and the one with the smallest bubble in lock step wins. 1F1B and the named schedules that fit
the limit take part, so the result is never worse than those.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterator

from ultrascale_jax.config import require
from ultrascale_jax.parallel.pipeline import orders as named
from ultrascale_jax.parallel.pipeline.table import KINDS, Cell, Schedule
from ultrascale_jax.plan.schedules.measures import bubble, held

type Job = tuple[int, int]
"""(microbatch, stage)."""


def from_costs(
    ranks: int,
    microbatches: int,
    f: float,
    b: float,
    w: float,
    memory_cap: int,
    *,
    virtual: int = 1,
) -> Schedule:
    """Return the table with the smallest bubble that the rules find, checked.

    `f`, `b`, `w` are the times of a forward, an input gradient and a weight gradient (any unit; see
    `measures.bubble`). `memory_cap` bounds `measures.held`, the (microbatch, chunk) of a rank between F and the last
    operation on them; it is at least `virtual`. Raises `UserError` for values that make no schedule.
    """
    for field, value in {
        "mesh.pp": ranks,
        "train.microbatches": microbatches,
        "pp.virtual": virtual,
    }.items():
        require(value >= 1, field, value, "must be at least 1")
    for field, value in {"f": f, "b": b, "w": w}.items():
        require(0 < value < math.inf, field, value, "must be a positive time")
    fix = f"must be at least {virtual}: one microbatch in all chunks of a rank"
    require(memory_cap >= virtual, "memory_cap", memory_cap, fix)
    table = Schedule(name="from_costs", ranks=ranks, virtual=virtual, microbatches=microbatches)
    found = [made for made in _candidates(table, memory_cap) if max(held(made)) <= memory_cap]
    best = min(found, key=lambda s: (round(bubble(s, f, b, w), 9), max(held(s)), len(s.ticks)))
    return dataclasses.replace(best, name="from_costs").check()


def _candidates(table: Schedule, cap: int) -> Iterator[Schedule]:
    yield from _named(table)
    if table.virtual == 1:
        yield _unfused(table, cap)
    yield _rounds(table, cap)
    yield _by_ticks(table, cap)
    yield _by_ticks(dataclasses.replace(table, split=True), cap)


def _named(like: Schedule) -> Iterator[Schedule]:
    """Yield the named schedules with the virtual stages of `like` that are made for lock step."""
    p, m, v = like.ranks, like.microbatches, like.virtual
    if v == 1:
        yield named.one_f_one_b(p, m)
        yield named.zb_uniform(p, (m,), 1)
    elif m >= p:
        groups = named.depth_first(p, m)
        yield named.interleaved(p, groups, v)
        yield named.zb_uniform(p, groups, v)


def _unfused(table: Schedule, cap: int) -> Schedule:
    """Return 1F1B with one operation a tick, rank r with p - r in flight or `cap` (Megatron-LM, arXiv 2104.04473)."""
    p, m = table.ranks, table.microbatches
    orders = [named.one_f_one_b_order(r, m, min(m, cap - 1, p - 1 - r)) for r in range(p)]
    return named.pack(table, orders)


def _rounds(table: Schedule, cap: int) -> Schedule:
    """Return AFAB in rounds of as many microbatches as fit: in lock step, phases of one kind cost no other."""
    m, v = table.microbatches, table.virtual
    orders: list[list[Cell]] = []
    for rank in range(table.ranks):
        stages = [table.stage_of(rank, chunk) for chunk in range(v)]
        order: list[Cell] = []
        for first in range(0, m, cap // v):
            some = range(first, min(m, first + cap // v))
            order += [{"F": (i, stage)} for stage in stages for i in some]
            order += [{"B": (i, stage)} for stage in reversed(stages) for i in some]
        orders.append(order)
    return named.pack(table, orders)


class _Simulation:
    """The simulator's state: the jobs that each rank could run next, and the memory that it holds."""

    def __init__(self, table: Schedule, cap: int):
        p, m = table.ranks, table.microbatches
        self.table, self.cap = table, cap
        self.left = p * table.virtual * m * len(table.kinds)
        self.ready: dict[str, list[list[tuple[tuple[int, ...], Job]]]] = {
            kind: [[] for _ in range(p)] for kind in KINDS
        }
        self.held = [0] * p
        self.forwards = [[0] * m for _ in range(p)]
        self.backwards = [[0] * m for _ in range(p)]
        self.oldest = [0] * p
        for i in range(m):
            self._offer("F", (i, 0))

    def _offer(self, kind: str, job: Job) -> None:
        """Make `job` ready."""
        i, stage = job
        s = self.table
        chunk = s.chunk_of(stage)
        # Groups of p microbatches chunk by chunk, as Megatron orders them; W in the order of the B.
        key = (-self.left,) if kind == "W" else (i // s.ranks, chunk if kind == "F" else -chunk, i)
        heapq.heappush(self.ready[kind][s.rank_of(stage)], (key, job))

    def next(self, kind: str, rank: int) -> Job | None:
        """Return the best `kind` that `rank` could run now."""
        jobs = self.ready[kind][rank]
        if kind != "F":
            return jobs[0][1] if jobs else None
        if not jobs or self.held[rank] >= self.cap:
            return None
        oldest = self.oldest[rank]
        choice = (job for job in (jobs[0][1], *(j for _, j in jobs if j[0] == oldest)))
        return next((job for job in choice if self._safe(rank, job[0])), None)

    def _safe(self, rank: int, microbatch: int) -> bool:
        """Return whether, after one more forward of `microbatch`, every microbatch can still end.

        The banker's algorithm in the order of the microbatches: each frees what it holds for the next.
        """
        v, forwards, backwards = self.table.virtual, self.forwards[rank], self.backwards[rank]
        free = self.cap - self.held[rank] + len(self.ready["W"][rank]) - 1
        for i in range(self.oldest[rank], len(forwards)):
            if free >= v:
                break
            run = forwards[i] + (i == microbatch)
            if free < v - run:
                return False
            free += run - backwards[i]
        return True

    def start(self, kind: str, rank: int, job: Job) -> None:
        """Take `job`, which `next` returned, off the ready ones; F takes memory, the last kind frees it."""
        jobs = self.ready[kind][rank]
        if jobs[0][1] == job:
            heapq.heappop(jobs)
        else:
            jobs.remove(next(entry for entry in jobs if entry[1] == job))
            heapq.heapify(jobs)
        self.left -= 1
        self.held[rank] += (kind == "F") - (kind == self.table.kinds[-1])
        if kind == "F":
            self.forwards[rank][job[0]] += 1
        if kind == "B":
            done = self.backwards[rank]
            done[job[0]] += 1
            while self.oldest[rank] < len(done) and done[self.oldest[rank]] == self.table.virtual:
                self.oldest[rank] += 1
            if self.table.split:
                self._offer("W", job)

    def finish(self, kind: str, job: Job) -> None:
        """Make the job that waited for `job` ready."""
        i, stage = job
        if kind == "F":
            last = stage == self.table.num_stages - 1
            self._offer(*(("B", job) if last else ("F", (i, stage + 1))))
        elif kind == "B" and stage > 0:
            self._offer("B", (i, stage - 1))


def _by_ticks(table: Schedule, cap: int) -> Schedule:
    """Fill ticks with one slot of each kind as early as memory allows; all ranks run their W together."""
    s = _Simulation(table, cap)
    ticks: list[list[Cell]] = []
    everyone = range(table.ranks)
    while s.left:
        row: list[dict[str, Job]] = [{} for _ in everyone]
        full = False
        for rank in everyone:
            for kind in ("F", "B"):
                job = s.next(kind, rank)
                if job:
                    s.start(kind, rank, job)
                    row[rank][kind] = job
            full |= "F" not in row[rank] and bool(s.ready["F"][rank])
        busy = [rank for rank in everyone if s.oldest[rank] < table.microbatches]
        if full or not any(row) or all(s.ready["W"][rank] for rank in busy):
            for rank in everyone:
                job = s.next("W", rank)
                if job:
                    s.start("W", rank, job)
                    row[rank]["W"] = job
        for cell in row:
            for kind, job in cell.items():
                s.finish(kind, job)
        ticks.append([*row])
    return table.with_ticks(ticks)
