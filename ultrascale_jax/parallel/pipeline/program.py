"""Assign a schedule's values to buffer slots, and write the program that the executor reads tick by tick.

Every activation, gradient, residual and weight-gradient input gets a slot for as long as it lives, by interval
colouring, so a buffer is exactly as large as the peak on the fullest rank. Idle ranks write to one more slot, the last.
Every number of the program is known before compilation.
"""

from dataclasses import dataclass

import numpy as np

from ultrascale_jax.parallel.pipeline.segments import ENOUGH, Segment, segments
from ultrascale_jax.parallel.pipeline.table import Schedule

PORTS = ("from_previous", "from_next", "from_self")
"""Sources of a message: the rank before, the rank after, or this one (the turn of a V)."""

PASSES = {"F": "forward", "B": "backward", "W": "weight"}
"""Kind of operation to the first word of its columns."""

SLOTS = {
    "X": ("forward_input", "backward_input"),
    "G": ("backward_gradient", "head_gradient"),
    "R": ("forward_residuals", "backward_residuals"),
    "W": ("backward_queue", "weight_queue"),
}
"""Buffers (inputs, gradients, residuals, queue of weight gradients) and the columns that hold slots of them."""

READ_AHEAD = (
    *("forward_input", "forward_first", "backward_input", "backward_gradient"),
    *("embed", "embed_mb"),
)
"""Columns that a tick needs of the next one, whose inputs it reads at its end."""


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Slots of each ring buffer, without the one for idle ranks."""

    inputs: int
    """Inputs of stages; with `stash="input"` until their backward pass."""
    gradients: int
    """Gradients of the outputs of stages."""
    residuals: int
    """Residuals of a stage's layers for the backward pass; 0 with `stash="input"`."""
    weights: int
    """Inputs of weight gradients that wait; 0 unless the schedule splits the backward pass."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program that the executor runs."""

    schedule: Schedule
    slots: Slots
    ranks: dict[str, np.ndarray]
    """`[ticks, ranks]` int32: of each operation k of `PASSES`: k_on, k_mb, k_chunk and its slots; of each port its
    destination slots."""
    every: dict[str, np.ndarray]
    """`[ticks]` int32, the same on every rank: of each k of `ENOUGH`: k, whether the tick runs it, and k_mb."""
    segments: tuple[Segment, ...]
    ports: dict[str, tuple[tuple[int, int], ...]]
    """The ports that any tick uses, as `forward_from_previous`, and the pairs (from, to) of ranks that use it."""

    def columns(self, tables: dict[str, np.ndarray]) -> tuple[dict, dict]:
        """Return `tables` with a column next_* for what a tick reads ahead, and that column before the first tick."""
        read_ahead = {f"next_{name}": tables[name] for name in READ_AHEAD if name in tables}
        shifted = {
            name: np.concatenate([table[1:], np.zeros_like(table[:1])])
            for name, table in read_ahead.items()
        }
        return tables | shifted, {name: table[0] for name, table in read_ahead.items()}


def _ports() -> list[str]:
    return [f"{k}_{port}" for k in ("forward", "backward") for port in PORTS]


class _Pool:
    """Slots of one rank's ring buffer."""

    def __init__(self):
        self.free: list[int] = []
        self.size = 0

    def allocate(self) -> int:
        if self.free:
            return self.free.pop()
        self.size += 1
        return self.size - 1


_IDLE = -1


class _Assembler:
    """The state of one pass over the table."""

    def __init__(self, schedule: Schedule, stash: str):
        self.schedule = schedule
        self.backward = any("B" in cell for tick in schedule.ticks for cell in tick)
        self.keeps_input = self.backward and stash == "input"
        shape = (len(schedule.ticks), schedule.ranks)
        self.ranks = {
            f"{k}_{name}": np.zeros(shape, np.int32)
            for k in PASSES.values()
            for name in ("on", "mb", "chunk")
        }
        self.ranks |= {
            name: np.zeros(shape, np.int32)
            for name in ("forward_first", "forward_last", "backward_first")
        }
        slots = (name for names in SLOTS.values() for name in names)
        self.ranks |= {name: np.full(shape, _IDLE, np.int32) for name in (*slots, *_ports())}
        self.every = {k + end: np.zeros(shape[0], np.int32) for k in ENOUGH for end in ("", "_mb")}
        self.pools = {kind: [_Pool() for _ in range(shape[1])] for kind in "XGRW"}
        self.slot: dict[tuple[str, int, int], int] = {}
        self.released: list[tuple[str, int, int]] = []
        self.pairs: dict[str, set[tuple[int, int]]] = {port: set() for port in _ports()}

    def allocate(self, kind: str, rank: int, value: tuple[int, int]) -> int:
        self.slot[kind, *value] = slot = self.pools[kind][rank].allocate()
        return slot

    def release(self, kind: str, rank: int, value: tuple[int, int]) -> int:
        """Free and return the slot of a value read for the last time; values that arrive in this tick need another."""
        slot = self.slot.pop((kind, *value))
        self.released.append((kind, rank, slot))
        return slot

    def operation(self, t: int, rank: int, kind: str, mb: int, stage: int) -> None:
        k, value, last, at = PASSES[kind], (mb, stage), self.schedule.num_stages - 1, (t, rank)
        cells = self.ranks
        cells[f"{k}_on"][at], cells[f"{k}_mb"][at] = 1, mb
        cells[f"{k}_chunk"][at] = self.schedule.chunk_of(stage)
        if kind == "F":
            cells["forward_first"][at], cells["forward_last"][at] = stage == 0, stage == last
            if stage == 0:
                self.allocate("X", rank, value)
                self.once("embed", t, mb)
            if self.keeps_input:
                cells["forward_input"][at] = self.slot["X", *value]
            else:
                cells["forward_input"][at] = self.release("X", rank, value)
            if self.backward and not self.keeps_input:
                cells["forward_residuals"][at] = self.allocate("R", rank, value)
            if self.backward and stage == last:
                cells["head_gradient"][at] = self.allocate("G", rank, value)
            if stage == last:
                self.once("head", t, mb)
        elif kind == "B":
            cells["backward_first"][at] = stage == 0
            cells["backward_gradient"][at] = self.release("G", rank, value)
            if self.keeps_input:
                cells["backward_input"][at] = self.release("X", rank, value)
            else:
                cells["backward_residuals"][at] = self.release("R", rank, value)
            if self.schedule.split:
                cells["backward_queue"][at] = self.allocate("W", rank, value)
            if stage == 0:
                self.once("embed_gradient", t, mb)
        else:
            cells["weight_queue"][at] = self.release("W", rank, value)

    def once(self, name: str, t: int, mb: int) -> None:
        self.every[name][t], self.every[f"{name}_mb"][t] = 1, mb

    def send(self, t: int, rank: int, kind: str, mb: int, stage: int) -> None:
        """Send the operation's result to the rank of the next stage, or of the one before."""
        to = stage + 1 if kind == "F" else stage - 1
        if not 0 <= to < self.schedule.num_stages:
            return
        owner, p = self.schedule.rank_of(to), self.schedule.ranks
        port = "from_previous" if owner == (rank + 1) % p else "from_next"
        port = f"{PASSES[kind]}_{'from_self' if owner == rank else port}"
        self.ranks[port][t, owner] = self.allocate("X" if kind == "F" else "G", owner, (mb, to))
        self.pairs[port].add((rank, owner))

    def end_tick(self) -> None:
        for kind, rank, slot in self.released:
            self.pools[kind][rank].free.append(slot)
        self.released.clear()


def assemble(schedule: Schedule, stash: str = "residuals") -> Program:
    """Assemble the program of a checked schedule. `stash`: `residuals` or `input`, as `PipelineConfig.stash`.

    A table of forward operations alone keeps its inputs for one tick: `stash` does not matter.
    """
    work = _Assembler(schedule, stash)
    for t, tick in enumerate(schedule.ticks):
        for rank, cell in enumerate(tick):
            for kind in "FBW":
                if kind in cell:
                    work.operation(t, rank, kind, *cell[kind])
        for rank, cell in enumerate(tick):
            for kind in "FB":
                if kind in cell:
                    work.send(t, rank, kind, *cell[kind])
        work.end_tick()
    return _finish(work)


def _finish(work: _Assembler) -> Program:
    sizes = {kind: max(pool.size for pool in pools) for kind, pools in work.pools.items()}
    ranks = work.ranks
    forward, backward = _ports()[:3], _ports()[3:]
    homes = SLOTS | {"X": (*SLOTS["X"], *forward), "G": (*SLOTS["G"], *backward)}
    for kind, names in homes.items():
        for name in names:
            ranks[name] = np.where(ranks[name] == _IDLE, sizes[kind], ranks[name]).astype(np.int32)
    slots = Slots(inputs=sizes["X"], gradients=sizes["G"], residuals=sizes["R"], weights=sizes["W"])
    return Program(
        schedule=work.schedule,
        slots=slots,
        ranks=ranks,
        every=work.every,
        segments=segments(work.schedule),
        ports={name: tuple(sorted(pairs)) for name, pairs in work.pairs.items() if pairs},
    )
