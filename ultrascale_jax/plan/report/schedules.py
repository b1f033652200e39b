"""Figures of pipeline schedules: one table drawn, and the bubbles of all."""

import itertools

from ultrascale_jax.parallel.pipeline.schedules import KINDS, Runtime, Schedule, build
from ultrascale_jax.parallel.pipeline.table import Op
from ultrascale_jax.plan.report.figures import Figure, Lines, Operation, Pipeline, Point

NAMES = {"F": "forward", "B": "backward", "W": "weight gradient"}

DRAWN: tuple[tuple[str, str, int, Runtime], ...] = (
    ("1f1b", "1f1b, afab", 1, "lockstep"),
    ("interleaved", "interleaved, v=2", 2, "lockstep"),
    ("zb_uniform", "zb_uniform, v=2", 2, "lockstep"),
    ("zb_h1", "zb_h1", 1, "dependencies"),
    ("zb_v", "zb_v, dualpipe_v", 2, "dependencies"),
)
"""Lines of the bubbles' figure: schedule, name, stages of a rank, runtime."""


def drawing(
    schedule: Schedule,
    costs: tuple[float, float, float] = (1.0, 1.0, 1.0),
    runtime: Runtime = "lockstep",
) -> Pipeline:
    """The table as the playbook draws pipelines; costs and runtime (not `divergent`) as in `Schedule.bubble`."""
    timed = _in_lock_step(schedule, *costs) if runtime == "lockstep" else schedule.timeline(*costs)
    operations = [
        Operation(
            rank=op.rank,
            start=op.start,
            duration=op.end - op.start,
            kind=op.kind,
            microbatch=op.microbatch,
            chunk=schedule.chunk_of(op.stage),
        )
        for op in timed
    ]
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
        operations=operations,
        ranks=schedule.ranks,
        chunks=schedule.virtual,
        width=max(op.end for op in timed),
        kinds=NAMES | split,
        unit="time, in forward passes of a rank" if f == 1 else "time",
        in_flight=schedule.in_flight,
    )


def _in_lock_step(schedule: Schedule, f: float, b: float, w: float) -> list[Op]:
    """The operations of each tick one kind after the other, each as long as on any rank."""
    cost = {"F": f, "B": b if schedule.split else b + w, "W": w}
    found, now = [], 0.0
    for tick, row in enumerate(schedule.ticks):
        for kind in KINDS:
            end = now + cost[kind] / schedule.virtual
            ran = [(rank, cell[kind]) for rank, cell in enumerate(row) if kind in cell]
            found += [Op(rank, tick, kind, *operation, now, end) for rank, operation in ran]
            now = end if ran else now
    return found


def bubbles() -> Figure:
    """Idle over busy time of a pipeline by schedule (playbook, chapter Pipeline Parallelism)."""
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
