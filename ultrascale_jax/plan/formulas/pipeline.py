"""Count what a pipeline does in a step, in the table that the executor runs; no JAX.

`parallel/pipeline/program.py` gives the ticks by the kinds of operation in them and the slots of every buffer. A table
grows with the micro-batches; its counts grow by the same amount with each further row of them, once there are a few
rows. So the counts of two small tables are continued to a large one.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ultrascale_jax.config import GROUPED
from ultrascale_jax.config.pipeline import Stash
from ultrascale_jax.parallel.experts.capacity import DENSE_OR_SHARED
from ultrascale_jax.parallel.pipeline import schedules
from ultrascale_jax.parallel.pipeline.segments import ENOUGH, segments
from ultrascale_jax.parallel.pipeline.table import KINDS, Schedule
from ultrascale_jax.parallel.pipeline.table_csv import read_csv
from ultrascale_jax.plan.model_shape import ModelShape
from ultrascale_jax.plan.schedules.measures import holdings
from ultrascale_jax.plan.workload import Run, of_sizes

if TYPE_CHECKING:
    from ultrascale_jax.hlo import Instruction, Module


@dataclass(frozen=True)
class Counts:
    """Counts of a pipeline's operations and values in one step."""

    ticks: dict[str, int]
    """By the kind of operation: ticks that run it, on whatever rank (in lock step all wait for it); and `all`."""
    times: dict[str, int]
    """Times that the executor runs `embed`, `head` and `embed_gradient`."""
    slots: dict[str, int]
    """As `program.Slots`: most values of a kind at once on the fullest rank."""
    peaks: dict[str, int]
    """Chunks that the fullest rank keeps at once: `in_flight` from forward to backward pass, then `w_queue`."""
    in_flight: dict[int, int]
    """Rank to the chunks that it keeps at once from forward to backward pass."""


def counts(run: Run) -> Counts:
    """Return the counts of the pipeline of `run`.

    Raises:
      UserError: the schedule does not exist for these numbers.
    """
    return _of_sizes(run)[run.stash]


def stack_rows(run: Run) -> tuple[int, int]:
    """Count the rows that each rank of a pipeline has of the stacks of dense layers, and of layers of experts."""
    layers = run.shape.num_layers
    return _stack_rows(_key(run), layers, layers - run.shape.moe_layers)


def rank_layers(run: Run) -> tuple[int, ...]:
    """Count the layers of the model that each rank has, without padding."""
    key, shape = _key(run), run.shape
    table = _table(key if key.fewer is None else key._replace(microbatches=key.fewer[0]))
    dense = 0 if shape.pattern else shape.num_layers - shape.moe_layers
    stages = table.ranks, table.virtual, table.placement
    group = shape.layer_group
    order = schedules.layer_order(*stages, shape.num_layers // group, dense // group)
    rows = len(order) // table.ranks
    return tuple(
        group * sum(layer is not None for layer in order[rank * rows : (rank + 1) * rows])
        for rank in range(table.ranks)
    )


def shares(run: Run, module: "Module") -> Callable[["Instruction", tuple[int, ...]], float]:
    """Return the shares of time in which a conditional of the step takes its slowest branch, for the timeline.

    For head or embedding it is the share of the ticks that run it: a loop over ticks is the segment of the table that
    has as many, or else the nearest. For layers of both kinds it is the share of those with experts, and for attention
    with and without a window the share of the layers without. A pipeline's stages have layers of both kinds in one
    iteration, and all wait for the slower kind: for the experts, or for the dense layer in their place.
    """
    # They import numpy, which no formula does.
    from ultrascale_jax.hlo.classes import block_of
    from ultrascale_jax.parallel.pipeline.program import assemble

    shape = run.shape
    program = None if run.mesh.pp == 1 else assemble(_table(_key(run)), run.stash)

    def share(conditional: "Instruction", trips: tuple[int, ...]) -> float:
        bodies = (module.computations[name] for name in conditional.called)
        inside = [i.op_name for body in bodies for i in body]
        if any(re.search(r"[/(]attention[/)]", name) for name in inside):
            return shape.expert_share if shape.is_mixed else 1 - shape.window_share
        if program is None:
            return 1.0
        if block_of(module, conditional) == "moe":
            return float((DENSE_OR_SHARED in conditional.op_name) == _dense_is_slower(shape))
        column = "embed_gradient" if any("transpose" in name for name in inside) else "embed"
        column = "head" if any("loss" in name for name in inside) else column
        ticks = trips[0] if trips else 1
        segment = min(program.segments, key=lambda s: abs(s.stop - s.start - ticks))
        return float(program.every[column][segment.start : segment.stop].mean())

    return share


def _dense_is_slower(shape: ModelShape) -> bool:
    """Return whether a dense layer has wider products for a token than a layer of experts."""
    experts = shape.experts
    return experts is None or shape.d_ff > (experts.top_k + experts.shared) * shape.expert_d_ff


class Key(NamedTuple):
    """Arguments that determine a table."""

    schedule: str
    ranks: int
    microbatches: int
    virtual: int

    @property
    def fewer(self) -> tuple[int, int, int] | None:
        """Two numbers of micro-batches, and how many times the way between them leads from the first to all of them.

        None where the table is small or the user's, or its groups of micro-batches are not all as small as they can be.
        """
        grouped = self.virtual > 1 and self.schedule in GROUPED
        row = self.ranks if grouped else 1
        small = 6 * row if grouped else 2 * self.ranks
        steps = (self.microbatches - small) // row
        is_fixed = self.schedule.lower().endswith(".csv") or self.microbatches % row > 0
        return None if is_fixed or steps <= 1 else (small, small + row, steps)


@of_sizes
def _of_sizes(run: Run) -> dict[Stash, Counts]:
    return _counts(_key(run))


@of_sizes
def _key(run: Run) -> Key:
    return Key(run.schedule, run.mesh.pp, run.microbatches, run.virtual_stages)


@functools.cache
def _counts(key: Key) -> dict[Stash, Counts]:
    """Return the counts with either stash."""
    if key.fewer is None:
        return _joined(*_counted(key))
    small, larger, steps = key.fewer
    first, second = (_counted(key._replace(microbatches=m)) for m in (small, larger))
    pairs = zip(first[1], second[1], strict=True)
    by_segment = [_continued(a, b, steps) for a, b in pairs]
    return _joined(_continued(first[0], second[0], steps), by_segment)


def _joined(
    counted: dict[str, dict[Any, int]], by_segment: list[dict[str, int]]
) -> dict[Stash, Counts]:
    """Return the `Counts` of `_counted`'s result."""
    times = dict.fromkeys(ENOUGH, 0)
    for segment in by_segment:
        for name, enough in ENOUGH.items():
            needed, every = segment[name], segment["ticks"]
            times[name] += every if needed and needed >= enough * every else needed
    most = counted["most"]
    peaks = {name: most[name] for name in ("in_flight", "w_queue")}
    shared: dict[str, Any] = {"times": times, "peaks": peaks}
    shared |= {name: counted[name] for name in ("ticks", "in_flight")}
    slots = {"gradients": most["gradients"], "weights": most["w_queue"]}
    stashed = {"inputs": most["stashed_inputs"], "residuals": 0}
    kept = {"inputs": most["inputs"], "residuals": most["in_flight"]}
    return {
        "residuals": Counts(slots=kept | slots, **shared),
        "input": Counts(slots=stashed | slots, **shared),
    }


def _continued(first: Any, second: Any, steps: int) -> Any:
    """Continue numbers, or dicts of them, by `steps` times the way from the first to the second."""
    if isinstance(first, dict):
        return {name: _continued(first[name], second[name], steps) for name in first}
    return first + steps * (second - first)


@functools.cache
def _stack_rows(key: Key, layers: int, dense: int) -> tuple[int, int]:
    table = _table(key if key.fewer is None else key._replace(microbatches=key.fewer[0]))
    stages = table.ranks, table.virtual, table.placement
    order = schedules.layer_order(*stages, layers, dense)
    first, later = schedules.stack_orders(order, table.ranks, dense)
    return len(first) // table.ranks, len(later) // table.ranks


@functools.lru_cache(8)
def _table(key: Key) -> Schedule:
    if key.schedule.lower().endswith(".csv"):
        return read_csv(key.schedule)
    return schedules.build(*key)


@functools.cache
def _counted(key: Key) -> tuple[dict[str, dict[Any, int]], list[dict[str, int]]]:
    """Count ticks, most values at once and values in flight by rank; and for each segment the ticks, and the ticks that
    need each of `ENOUGH`."""
    schedule = _table(key)
    last = schedule.num_stages - 1
    needed = {"embed": ("F", 0), "head": ("F", last), "embed_gradient": ("B", 0)}
    ticks, counted = {"all": len(schedule.ticks)} | dict.fromkeys(KINDS, 0), []
    for segment in segments(schedule):
        length = segment.stop - segment.start
        for kind in segment.kinds:
            ticks[kind] += length
        counted.append({"ticks": length})
        for name, (kind, stage) in needed.items():
            cells = (
                row[schedule.rank_of(stage)] for row in schedule.ticks[segment.start : segment.stop]
            )
            counted[-1][name] = sum(kind in cell and cell[kind][1] == stage for cell in cells)
    kept = holdings(schedule)
    most = {name: max(ranks) for name, ranks in vars(kept).items()}
    return {"ticks": ticks, "most": most, "in_flight": dict(enumerate(kept.in_flight))}, counted
