"""Make the named schedules by rules: a tick for each operation, or an order of operations for each rank.

Lock-step schedules (`afab`, `1f1b`, `interleaved`, `zb_uniform`) have closed forms: a tick has one F slot and one B
slot (and one W slot), and rank r runs its k-th forward in tick r + k. `zb_h1`, `zb_v` and `dualpipe_v` are an order for
each rank, packed into ticks.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence

from ultrascale_jax.config import require_choice
from ultrascale_jax.parallel.pipeline.table import Cell, Placement, Schedule, ScheduleError


def afab(ranks: int, microbatches: int) -> Schedule:
    """Run all forwards, then all backwards (GPipe, arXiv 1811.06965): two phases of m + p - 1 ticks."""
    p, m = ranks, microbatches
    ticks = _cells(p, 2 * (m + p - 1))
    for rank in range(p):
        for i in range(m):
            ticks[rank + i][rank]["F"] = (i, rank)
            ticks[m + 2 * p - 2 - rank + i][rank]["B"] = (i, rank)
    return Schedule(name="afab", ranks=p, microbatches=m).with_ticks(ticks)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Run one forward and one backward a tick (PipeDream-Flush, arXiv 2006.09503): at most 2 (p - r) in flight."""
    return _fused("1f1b", ranks, (microbatches,), virtual=1, split=False)


def interleaved(ranks: int, groups: Sequence[int], virtual: int) -> Schedule:
    """Run 1F1B over v chunks a rank (Megatron-LM, arXiv 2104.04473), a group of microbatches of a chunk in a row.

    Groups from p, depth first, to m, breadth first (Llama 3.1, arXiv 2407.21783, section 3.3.2): with the largest
    group at most (v - 1) group + 2 (p - r) chunks in flight.
    """
    return _fused("interleaved", ranks, groups, virtual=virtual, split=False)


def zb_uniform(ranks: int, groups: Sequence[int], virtual: int) -> Schedule:
    """Run zero bubble in lock step: interleaved with a W slot in every tick from rank 0's first B on.

    Rank r defers each W by r ticks, so that all ranks run the same kinds in a tick and no W is masked. Ours, after the
    split of B and W in arXiv 2401.10241.
    """
    return _fused("zb_uniform", ranks, groups, virtual=virtual, split=True)


def divided(count: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of `parts` parts of `count`, alike or one more in the first ones."""
    each, remainder = divmod(count, parts)
    return (each + 1,) * remainder + (each,) * (parts - remainder)


def depth_first(ranks: int, microbatches: int) -> tuple[int, ...]:
    """Return the smallest groups, of at least p: a microbatch is back at its rank when the group has gone through."""
    return divided(microbatches, max(1, microbatches // ranks))


def _fused(name: str, ranks: int, groups: Sequence[int], *, virtual: int, split: bool) -> Schedule:
    p, m, v = ranks, sum(groups), virtual
    # Rank p-1 can begin its backwards a tick after a group's first microbatch has been through its last chunk.
    turn = (v - 1) * max(groups) + p
    ticks = _cells(p, turn + p - 1 + m * v)
    starts = itertools.accumulate(groups, initial=0)
    parts = itertools.product(zip(starts, groups, strict=False), range(v))
    order = [(start + offset, chunk) for (start, size), chunk in parts for offset in range(size)]
    for k, (i, chunk) in enumerate(order):
        for rank in range(p):
            backward = (i, (v - 1 - chunk) * p + rank)
            ticks[rank + k][rank]["F"] = (i, chunk * p + rank)
            ticks[turn + p - 1 - rank + k][rank]["B"] = backward
            if split:
                ticks[turn + p - 1 + k][rank]["W"] = backward
    return Schedule(name=name, ranks=p, virtual=v, microbatches=m, split=split).with_ticks(ticks)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Run ZB-H1 (arXiv 2401.10241): 1F1B's order and memory, rank r defers each W by r microbatches."""
    p, m = ranks, microbatches
    orders: list[list[Cell]] = []
    for rank in range(p):
        warmup = min(m, p - 1 - rank)
        order: list[Cell] = [{"F": (i, rank)} for i in range(warmup)]
        for i in range(m):
            if warmup + i < m:
                order.append({"F": (warmup + i, rank)})
            order.append({"B": (i, rank)})
            if i >= rank:
                order.append({"W": (i - rank, rank)})
        orders.append(order + [{"W": (i, rank)} for i in range(max(0, m - rank), m)])
    return pack(Schedule(name="zb_h1", ranks=p, microbatches=m, split=True), orders)


class _Order:
    """One rank's cells in order; each operation is that of the next microbatch of its kind and stage."""

    def __init__(self, microbatches: int):
        self.microbatches = microbatches
        self.cells: list[Cell] = []
        self.count: Counter[tuple[str, int]] = Counter()
        self.deferred: list[tuple[int, int]] = []

    def next(self, kind: str, stage: int) -> tuple[int, int]:
        """Return microbatch and stage of the next operation."""
        self.count[kind, stage] += 1
        return self.count[kind, stage] - 1, stage

    def run(self, kinds: str, stage: int) -> None:
        """Append one operation a cell, as long as there are microbatches."""
        for kind in kinds:
            if self.count[kind, stage] < self.microbatches:
                self.cells.append({kind: self.next(kind, stage)})

    def forward(self, stage: int) -> Cell:
        """Return F, to be put into a cell."""
        return {"F": self.next("F", stage)}

    def backward(self, stage: int, defer: bool = False) -> Cell:
        """Return B, with its W in the same tick or later; to be put into a cell."""
        op = self.next("B", stage)
        if defer:
            self.deferred.append(op)
        return {"B": op} if defer else {"B": op, "W": op}

    def weights(self) -> None:
        """Append the oldest deferred W, if there is one."""
        if self.deferred:
            self.cells.append({"W": self.deferred.pop(0)})


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Run ZB-V (arXiv 2401.10241, section 6; 2405.15362): two chunks a rank in a V, 1F1B's memory."""
    p, m = ranks, microbatches
    orders = []
    for rank in range(p):
        down, up = rank, 2 * p - 1 - rank
        order = _Order(m)
        for _ in range(2 * (p - rank) - 1):
            order.run("F", down)
        for _ in range(rank):
            order.run("F", up)
            order.run("F", down)
        for _ in range(p - rank):
            order.run("FBW", up)
        while min(order.count["F", down], order.count["F", up]) < m:
            order.run("FBW", down)
            order.run("FBW", up)
        for _ in range(rank):
            order.run("B", down)
            order.run("B", up)
        for _ in range(p - rank):
            order.run("BW", down)
        for _ in range(m):
            order.run("W", up)
        for _ in range(m):
            order.run("W", down)
        orders.append(order.cells)
    return pack(_v_table("zb_v", p, m), orders)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Run DualPipeV: DualPipe (DeepSeek-V3, arXiv 2412.19437) folded to one copy of the model, in its eight steps.

    Forward of one chunk and backward of the other share a tick in the middle, so that one's communication hides behind
    the other's matmuls. Wants m >= 2 p.
    """
    p, m = ranks, microbatches
    return pack(_v_table("dualpipe_v", p, m), [_dualpipe_v_order(p, m, rank) for rank in range(p)])


def _dualpipe_v_order(p: int, m: int, rank: int) -> list[Cell]:
    """Return one rank's cells of `dualpipe_v`."""
    down, up = rank, 2 * p - 1 - rank
    order = _Order(m)
    add = order.cells.append
    for _ in range(2 * (p - rank - 1)):  # 1: nF0
        add(order.forward(down))
    for _ in range(rank + 1):  # 2: nF0F1
        add(order.forward(down))
        add(order.forward(up))
    for _ in range(p - rank - 1):  # 3: nB1W1F1
        add(order.backward(up, defer=True))
        order.weights()
        add(order.forward(up))
    for i in range(m - 2 * p + rank + 1):  # 4: nF0B1F1B0, the turn of the V not yet overlapped
        if i == 0 and rank == p - 1:
            add(order.forward(down))
            add(order.backward(up))
        else:
            add({**order.forward(down), **order.backward(up)})
        add({**order.forward(up), **order.backward(down)})
    for _ in range(p - rank - 1):  # 5: nB1F1B0
        add(order.backward(up))
        add({**order.forward(up), **order.backward(down)})
    half = (rank + 1) // 2
    for i in range(rank + 1):  # 6: nB1B0, the second half defers W
        add(order.backward(up, defer=2 * i > rank))
        add(order.backward(down, defer=i >= half))
    for _ in range(p - rank - 1):  # 7: nWB0
        order.weights()
        add(order.backward(down, defer=True))
    while order.deferred:  # 8: nW
        order.weights()
    return order.cells


def _v_table(name: str, ranks: int, microbatches: int) -> Schedule:
    return Schedule(
        name=name, ranks=ranks, virtual=2, microbatches=microbatches, placement="v", split=True
    )


def forward_only(ranks: int, virtual: int, placement: Placement, microbatches: int) -> Schedule:
    """Run forwards alone, for evaluation: of what a rank can run in a tick, the stage furthest down the chain."""
    require_choice("placement", placement, Placement)
    table = Schedule(
        name="forward",
        ranks=ranks,
        virtual=virtual,
        microbatches=microbatches,
        placement=placement,
        forward=True,
    )
    # A heap a rank: by stage from the last, then by microbatch.
    waiting: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    waiting[0] = [(0, i) for i in range(microbatches)]
    ticks: list[list[Cell]] = []
    while any(waiting):
        best = [heapq.heappop(ready) if ready else None for ready in waiting]
        ticks.append([{"F": (op[1], -op[0])} if op else {} for op in best])
        for minus_stage, i in filter(None, best):
            stage = 1 - minus_stage
            if stage < table.num_stages:
                heapq.heappush(waiting[table.rank_of(stage)], (-stage, i))
    return table.with_ticks(ticks).check()


def pack(table: Schedule, orders: Sequence[Sequence[Cell]]) -> Schedule:
    """Return `table` with the earliest ticks in which each rank can run its cells in order.

    Raises `ScheduleError` where the orders wait for each other.
    """
    ticks: list[list[Cell]] = []
    done: dict[tuple[str, int, int], int] = {}
    position = [0] * table.ranks
    while any(at < len(order) for at, order in zip(position, orders, strict=True)):
        tick = len(ticks)
        row: list[Cell] = []
        for at, order in zip(position, orders, strict=True):
            cell = order[at] if at < len(order) else {}
            row.append(cell if table.ready(cell, done, tick) else {})
        if not any(row):
            rank = next(r for r, order in enumerate(orders) if position[r] < len(order))
            kind, op = next(iter(orders[rank][position[rank]].items()))
            entry = table.entry(kind, *op)
            raise ScheduleError("the ranks wait for each other", rank, tick, entry)
        for rank, cell in enumerate(row):
            position[rank] += bool(cell)
            done.update({(kind, *op): tick for kind, op in cell.items()})
        ticks.append(row)
    return table.with_ticks(ticks)


def _cells(ranks: int, ticks: int) -> list[list[dict[str, tuple[int, int]]]]:
    return [[{} for _ in range(ranks)] for _ in range(ticks)]
