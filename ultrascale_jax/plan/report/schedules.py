"""Figures of pipeline schedules: one table drawn, and the bubbles of all."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ultrascale_jax.figures.charts import Lines, Point
from ultrascale_jax.figures.figure import Figure, Table, legend, rows_of
from ultrascale_jax.figures.palette import INK, OPERATIONS, PAPER, shade
from ultrascale_jax.parallel.pipeline.schedules import build
from ultrascale_jax.parallel.pipeline.table import KINDS, Op, Runtime, Schedule

NAMES = {"F": "forward", "B": "backward", "W": "weight gradient"}

DRAWN: tuple[tuple[str, str, int, Runtime], ...] = (
    ("1f1b", "1f1b, afab", 1, "lockstep"),
    ("interleaved", "interleaved, v=2", 2, "lockstep"),
    ("zb_uniform", "zb_uniform, v=2", 2, "lockstep"),
    ("zb_h1", "zb_h1", 1, "dependencies"),
    ("zb_v", "zb_v, dualpipe_v", 2, "dependencies"),
)
"""Lines of the bubbles' figure: schedule, name, stages of a rank, runtime."""


@dataclass(frozen=True, kw_only=True)
class Pipeline(Figure):
    """A schedule: a row of operations for each rank."""

    schedule: Schedule
    operations: Sequence[Op]
    kinds: Mapping[str, str]
    """Kinds of operation, in words."""
    unit: str

    @property
    def width(self) -> float:
        """Time of the whole step."""
        return max(op.end for op in self.operations)

    def table(self) -> Table:
        rows = []
        for rank in range(self.schedule.ranks):
            busy = sum(op.end - op.start for op in self.operations if op.rank == rank)
            idle = 100 * (1 - busy / self.width)
            rows.append((f"rank {rank}", busy, idle, self.schedule.in_flight[rank]))
        head = ("", f"busy ({self.unit})", "idle (%)", "most chunks in flight")
        return Table(head=head, rows=tuple(rows))

    def paint(self, canvas: Any) -> None:
        """Paint a row for each rank; in every operation its micro-batch, later chunks lighter; what is grey is idle."""
        ranks, chunks = self.schedule.ranks, self.schedule.virtual
        narrowest = min(op.end - op.start for op in self.operations)
        inches = min(28.0, max(7.0, 1.2 + 0.21 * self.width / narrowest))
        canvas.set_size_inches(inches, 1.1 + 0.36 * ranks)
        ax = canvas.subplots()
        room = 72 * (inches - 1.2) * narrowest / self.width  # points
        digits = max(len(str(op.microbatch)) for op in self.operations)
        size = min(7.5, room / (0.68 * digits))
        ax.broken_barh([(0, self.width)], (-0.46, ranks - 0.08), facecolors=INK, alpha=0.06)
        text = {"ha": "center", "va": "center", "fontsize": size, "color": "#000000"}
        for op in self.operations:
            colour = shade(OPERATIONS[op.kind], self.schedule.chunk_of(op.stage), chunks)
            style = {"facecolors": colour, "edgecolor": PAPER, "linewidth": 0.6}
            ax.broken_barh([(op.start, op.end - op.start)], (op.rank - 0.46, 0.92), **style)
            if size >= 3:
                ax.text(op.start + (op.end - op.start) / 2, op.rank, op.microbatch, **text)
        ax.set_xlim(0, self.width)
        rows_of(ax, [f"rank {rank}" for rank in range(ranks)], self.unit, lines=False)
        for kind in dict.fromkeys(op.kind for op in self.operations):
            for chunk in range(chunks):
                name = f"{self.kinds[kind]}{f', chunk {chunk}' if chunks > 1 else ''}"
                colour = shade(OPERATIONS[kind], chunk, chunks)
                ax.scatter([], [], marker="s", s=60, color=colour, label=name)
        legend(canvas, ax)


def drawing(
    schedule: Schedule,
    costs: tuple[float, float, float] = (1.0, 1.0, 1.0),
    runtime: Runtime = "lockstep",
) -> Pipeline:
    """Draw a table as the playbook draws pipelines; costs and runtime (not `divergent`) as in `Schedule.bubble`."""
    timed = _in_lock_step(schedule, *costs) if runtime == "lockstep" else schedule.timeline(*costs)
    virtual = f", {schedule.virtual} stages a rank" if schedule.virtual > 1 else ""
    split = {"B": "input gradient"} if schedule.split else {}
    how = "with true dependencies alone"
    if runtime == "lockstep":
        how = "in lock step: an operation takes its time on all ranks as soon as one runs it"
    f, b, w = costs
    return Pipeline(
        name=f"schedule_{schedule.name}",
        title=f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} micro-batches{virtual}",
        caption=f"Every rank's operations {how}. Forward {f:g}, input gradient {b:g}, weight gradient {w:g}; idle is "
        f"{schedule.bubble(*costs, runtime):.1%} of the work.",
        schedule=schedule,
        operations=timed,
        kinds=NAMES | split,
        unit="time, in forward passes of a rank" if f == 1 else "time",
    )


def _in_lock_step(schedule: Schedule, f: float, b: float, w: float) -> list[Op]:
    """Return the operations of each tick one kind after the other, each as long as on any rank."""
    cost = {"F": f, "B": b if schedule.split else b + w, "W": w}
    found, now = [], 0.0
    for tick, row in enumerate(schedule.ticks):
        for kind in KINDS:
            end = now + cost[kind] / schedule.virtual
            ran = [(rank, cell[kind]) for rank, cell in enumerate(row) if kind in cell]
            found += [Op(rank, tick, kind, *operation, now, end) for rank, operation in ran]
            now = end if ran else now
    return found


def bubbles() -> Lines:
    """Draw idle over busy time of a pipeline by schedule (playbook, chapter Pipeline Parallelism)."""
    panels: dict[str, dict[str, list[Point]]] = {}
    for stages, (schedule, name, virtual, runtime) in itertools.product((4, 8, 16), DRAWN):
        points = [
            Point(
                x=m,
                y=100 * max(0.0, build(schedule, stages, m, virtual).bubble(runtime=runtime)),
                solid=runtime == "lockstep",
            )
            for m in (4, 8, 16, 32, 64)
            if m >= stages
        ]
        panels.setdefault(f"{stages} stages", {})[name] = points
    return Lines(
        name="bubble",
        title="Pipeline bubble by schedule and number of micro-batches",
        caption="Idle over computing time of p equal stages and m micro-batches, from the tables of "
        "parallel/pipeline/schedules.py with forward pass, input gradient and weight gradient equally long: in lock "
        "step, as this trainer runs them. A hollow point is what a runtime with true dependencies would get.",
        panels=panels,
        x="micro-batches of a step",
        y="bubble (% of the work)",
        hollow="true dependencies alone",
    )
