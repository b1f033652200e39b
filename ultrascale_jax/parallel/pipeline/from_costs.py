"""Schedule by list scheduling: make a table for measured costs of F, B and W and a limit on memory.

Several rules make tables, and the one with the smallest bubble in the wanted runtime wins. 1F1B and the named
schedules that fit the limit take part, so the result is never worse than those.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterator

from ultrascale_jax.config import require
from ultrascale_jax.parallel.pipeline import orders as named
from ultrascale_jax.parallel.pipeline.table import KINDS, Cell, Placement, Runtime, Schedule

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
    placement: Placement = "loop",
    runtime: Runtime = "lockstep",
) -> Schedule:
    """Return the table with the smallest bubble that the rules find, checked.

    `f`, `b`, `w` are the times of a forward, an input gradient and a weight gradient (any unit; see
    `Schedule.bubble`). `memory_cap` bounds `Schedule.held`, the (microbatch, chunk) of a rank between F and the last
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
    require(placement in ("loop", "v"), "placement", placement, "must be loop or v")
    fix = f"must be at least {virtual}: one microbatch in all chunks of a rank"
    require(memory_cap >= virtual, "memory_cap", memory_cap, fix)
    table = Schedule(
        name="from_costs",
        ranks=ranks,
        virtual=virtual,
        microbatches=microbatches,
        placement=placement,
    )
    found = [
        made
        for made in _candidates(table, (f, b, w), memory_cap, runtime)
        if max(made.held) <= memory_cap
    ]
    best = min(
        found, key=lambda s: (round(s.bubble(f, b, w, runtime), 9), max(s.held), len(s.ticks))
    )
    return dataclasses.replace(best, name="from_costs").check()


def _candidates(
    table: Schedule, costs: tuple[float, float, float], cap: int, runtime: Runtime
) -> Iterator[Schedule]:
    split = dataclasses.replace(table, split=True)
    yield from _named(table)
    if table.virtual == 1:
        yield _unfused(table, cap)
    if runtime == "lockstep":
        yield _rounds(table, cap)
    if runtime != "dependencies":
        yield _by_ticks(table, cap)
        yield _by_ticks(split, cap)
    if runtime != "lockstep":
        yield _by_time(table, costs, cap, 0.0)
        for patience in (0.0, 0.5, 1.0):
            yield _by_time(split, costs, cap, patience)


def _named(like: Schedule) -> Iterator[Schedule]:
    """Return the named schedules with the placement and the virtual stages of `like`."""
    p, m, v = like.ranks, like.microbatches, like.virtual
    if like.placement == "v":
        if v == 2:
            yield named.zb_v(p, m)
        if v == 2 and m >= 2 * p:
            yield named.dualpipe_v(p, m)
    elif v == 1:
        yield named.one_f_one_b(p, m)
        yield named.zb_uniform(p, m, 1, m)
        yield named.zb_h1(p, m)
    elif m % p == 0:
        yield named.interleaved(p, m, v, p)
        yield named.zb_uniform(p, m, v, p)


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

    def _offer(self, kind: str, job: Job) -> int:
        """Make `job` ready; returns its rank."""
        i, stage = job
        s = self.table
        chunk = s.chunk_of(stage)
        # Groups of p microbatches chunk by chunk, as Megatron orders them; W in the order of the B.
        key = (-self.left,) if kind == "W" else (i // s.ranks, chunk if kind == "F" else -chunk, i)
        rank = s.rank_of(stage)
        heapq.heappush(self.ready[kind][rank], (key, job))
        return rank

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

    def follower(self, kind: str, job: Job) -> tuple[str, Job] | None:
        """Return the job that waits for `job` on another rank, or for the loss."""
        i, stage = job
        if kind == "F":
            last = stage == self.table.num_stages - 1
            return ("B", job) if last else ("F", (i, stage + 1))
        return ("B", (i, stage - 1)) if kind == "B" and stage > 0 else None

    def finish(self, kind: str, job: Job) -> int | None:
        """Make the jobs that waited for `job` ready; return the rank that can run the next one."""
        after = self.follower(kind, job)
        return self._offer(*after) if after else None


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


def _by_time(
    table: Schedule, costs: tuple[float, float, float], cap: int, patience: float
) -> Schedule:
    """Run one operation at a time on each rank: B before F before W, as soon as it can.

    A W does not start where something else arrives within `patience` times its length.
    """
    s = _Simulation(table, cap)
    f, b, w = costs
    cost = {"F": f, "B": b if table.split else b + w, "W": w}
    orders: list[list[Cell]] = [[] for _ in range(table.ranks)]
    running: list[tuple[float, int, str, Job]] = []
    idle, awake = set(range(table.ranks)), set(range(table.ranks))
    now = 0.0
    while s.left:
        for rank in sorted(awake & idle):
            kind, job = _choice(s, rank, running, now + patience * w)
            if job:
                s.start(kind, rank, job)
                orders[rank].append({kind: job})
                heapq.heappush(running, (now + cost[kind], rank, kind, job))
                idle.discard(rank)
        now = running[0][0]
        awake = set()
        # Sums of the same costs in another order differ by rounding.
        while running and running[0][0] <= now * (1 + 1e-12):
            _, rank, kind, job = heapq.heappop(running)
            idle.add(rank)
            woken = s.finish(kind, job)
            awake |= {rank} if woken is None else {rank, woken}
    return named.pack(table, orders)


def _choice(
    s: _Simulation, rank: int, running: list[tuple[float, int, str, Job]], until: float
) -> tuple[str, Job | None]:
    for kind in ("B", "F"):
        job = s.next(kind, rank)
        if job:
            return kind, job
    job = s.next("W", rank)
    if job:
        soon = (s.follower(kind, other) for end, _, kind, other in running if end < until)
        if any(after and s.table.rank_of(after[1][1]) == rank for after in soon):
            return "W", None
    return "W", job
