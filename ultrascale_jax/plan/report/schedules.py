"""Figures of pipeline schedules: one table drawn, and the bubbles of all."""

import itertools

from ultrascale_jax.figures.charts import Lines, Point
from ultrascale_jax.figures.pipeline import Operation, Pipeline
from ultrascale_jax.parallel.pipeline.schedules import build
from ultrascale_jax.parallel.pipeline.table import Runtime, Schedule

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
    """Draw a table as the playbook draws pipelines; costs and runtime (not `divergent`) as in `Schedule.bubble`."""
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
        operations=[
            Operation(
                op.rank, op.kind, op.microbatch, schedule.chunk_of(op.stage), op.start, op.end
            )
            for op in schedule.timeline(*costs, runtime)
        ],
        in_flight=schedule.in_flight,
        chunks=schedule.virtual,
        kinds=NAMES | split,
        unit="time, in forward passes of a rank" if f == 1 else "time",
    )


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
