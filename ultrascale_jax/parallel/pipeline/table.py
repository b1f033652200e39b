"""Represent a pipeline schedule as a table of rank and tick, which checks itself.

A stage is a run of layers; with v virtual stages a rank holds v of them, its chunks. The placement says
which: `loop` sends stage s to rank s % p, `v` folds the chain, so that odd chunks run backwards:

    loop, p=3, v=2:  rank 0: 0 3   rank 1: 1 4   rank 2: 2 5
    v,    p=3, v=2:  rank 0: 0 5   rank 1: 1 4   rank 2: 2 3

One cell holds at most one operation of each kind, run in the order F, B, W. Results of a tick can be used
from the next tick on, also on the same rank and also the gradient of the loss; only a W may share the tick of
its B.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from ultrascale_jax.config import UserError, require_choice

KINDS = ("F", "B", "W")
"""Forward, backward (the input gradient alone where the schedule splits it), weight gradient."""

type Cell = Mapping[str, tuple[int, int]]
"""Kind to (microbatch, stage): the operations of one rank in one tick."""

type Placement = Literal["loop", "v"]


class ScheduleError(UserError):
    """A table that cannot run; `rank`, `tick` and `entry` say where, None if it is no single entry."""

    def __init__(
        self, why: str, rank: int | None = None, tick: int | None = None, entry: str | None = None
    ):
        self.why, self.rank, self.tick, self.entry = why, rank, tick, entry
        place = [f"tick {tick}"] if tick is not None else []
        place += [f"rank {rank}"] if rank is not None else []
        place += [entry] if entry is not None else []
        super().__init__(f"schedule: {', '.join(place)}{': ' if place else ''}{why}")


def stage_of(rank: int, chunk: int, ranks: int, placement: Placement) -> int:
    """Return the stage that `rank` holds as its `chunk`."""
    return chunk * ranks + _turned(rank, chunk, ranks, placement)


def _turned(index: int, chunk: int, ranks: int, placement: Placement) -> int:
    """Map rank to position along its chunk of the chain, or back."""
    return ranks - 1 - index if placement == "v" and chunk % 2 else index


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A table tick x rank -> operations; `check` says whether it can run.

    Attributes:
      name: of the schedule.
      ranks: pipeline ranks (p).
      virtual: stages of one rank (v).
      microbatches: micro-batches of one step (m).
      placement: which stages a rank holds, `loop` or `v`.
      split: whether B is the input gradient alone and W follows; else B is the full backward pass.
      ticks: `ticks[tick][rank]`, the operations of a rank in a tick.
      forward: whether there is no backward pass at all (evaluation).
    """

    name: str
    ranks: int
    virtual: int = 1
    microbatches: int
    placement: Placement = "loop"
    split: bool = False
    ticks: tuple[tuple[Cell, ...], ...] = field(default=(), repr=False)
    forward: bool = False

    def __post_init__(self):
        require_choice("placement", self.placement, Placement)

    @property
    def num_stages(self) -> int:
        """Stages of the full model."""
        return self.ranks * self.virtual

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of operation that every (microbatch, stage) needs."""
        return KINDS[: 1 if self.forward else 3 if self.split else 2]

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds `stage`."""
        return _turned(stage % self.ranks, self.chunk_of(stage), self.ranks, self.placement)

    def chunk_of(self, stage: int) -> int:
        """Return the index of `stage` among its rank's stages, from 0."""
        return stage // self.ranks

    def stage_of(self, rank: int, chunk: int) -> int:
        """Return the stage that `rank` holds as its `chunk`."""
        return stage_of(rank, chunk, self.ranks, self.placement)

    def with_ticks(self, ticks: Iterable[Iterable[Cell]]) -> "Schedule":
        """Return this schedule with another table."""
        return dataclasses.replace(self, ticks=tuple(map(tuple, ticks)))

    def ops(self) -> Iterator[tuple[int, int, str, int, int]]:
        """Yield (tick, rank, kind, microbatch, stage) of every operation, in the order in which they run."""
        for tick, row in enumerate(self.ticks):
            for rank, cell in enumerate(row):
                for kind in KINDS:
                    if kind in cell:
                        yield tick, rank, kind, *cell[kind]

    def check(self) -> "Schedule":
        """Return this schedule. Raises `ScheduleError` that names the entry that makes it illegal."""
        self._check_shape()
        when: dict[tuple[str, int, int], int] = {}
        ops = list(self.ops())
        for tick, rank, kind, microbatch, stage in ops:
            why = self._misplaced(rank, microbatch, stage)
            if (kind, microbatch, stage) in when:
                why = f"it has run in tick {when[kind, microbatch, stage]} already"
            if why:
                raise ScheduleError(why, rank, tick, self.entry(kind, microbatch, stage))
            when[kind, microbatch, stage] = tick
        for tick, rank, kind, microbatch, stage in ops:
            for need, at in self.needs(kind, stage):
                made = when.get((need, microbatch, at))
                if made is None or made + (kind != "W") > tick:
                    use = "" if kind == "W" else ", for use from the next tick on"
                    where = "is missing" if made is None else f"runs in tick {made}{use}"
                    why = f"it needs {self.entry(need, microbatch, at)}, which {where}"
                    raise ScheduleError(why, rank, tick, self.entry(kind, microbatch, stage))
        operations = product(self.kinds, range(self.microbatches), range(self.num_stages))
        missing = next((op for op in operations if op not in when), None)
        if missing:
            raise ScheduleError(f"{self.entry(*missing)} is missing", self.rank_of(missing[2]))
        return self

    def entry(self, kind: str, microbatch: int, stage: int) -> str:
        """Return an operation in PyTorch's notation: `2F5` is the forward of microbatch 5 through stage 2."""
        return f"{stage}{'I' if kind == 'B' and self.split else kind}{microbatch}"

    def _check_shape(self) -> None:
        for name in ("ranks", "virtual", "microbatches"):
            if getattr(self, name) < 1:
                raise ScheduleError(f"{name}={getattr(self, name)}: must be at least 1")
        for tick, row in enumerate(self.ticks):
            if len(row) != self.ranks:
                raise ScheduleError(f"{len(row)} cells for {self.ranks} ranks", tick=tick)
            for rank, cell in enumerate(row):
                unknown = set(cell) - set(self.kinds)
                if unknown:
                    why = f"{min(unknown)!r} is none of its kinds {', '.join(self.kinds)}"
                    raise ScheduleError(why, rank, tick)

    def _misplaced(self, rank: int, microbatch: int, stage: int) -> str | None:
        if not 0 <= microbatch < self.microbatches:
            return f"there are microbatches 0 to {self.microbatches - 1} only"
        if not 0 <= stage < self.num_stages:
            return f"there are stages 0 to {self.num_stages - 1} only"
        owner = self.rank_of(stage)
        return f"stage {stage} is on rank {owner}" if rank != owner else None

    def needs(self, kind: str, stage: int) -> Iterator[tuple[str, int]]:
        """Return the (kind, stage) whose results an operation of the same microbatch uses."""
        last = stage == self.num_stages - 1
        if kind == "F" and stage > 0:
            yield "F", stage - 1
        elif kind == "B":
            yield "F", stage
            if not last:
                yield "B", stage + 1
        elif kind == "W":
            yield "B", stage

    def ready(self, cell: Cell, done: Mapping[tuple[str, int, int], int], tick: int) -> bool:
        """Return whether the inputs of `cell` exist before `tick`; `done` has the tick of each operation."""
        return all(
            (kind == "W" and cell.get("B") == (microbatch, stage))
            or all(done.get((k, microbatch, s), tick) < tick for k, s in self.needs(kind, stage))
            for kind, (microbatch, stage) in cell.items()
        )
