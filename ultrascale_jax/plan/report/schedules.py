"""Figures of pipeline schedules: one table drawn, or several one above the other."""

from collections.abc import Sequence

from ultrascale_jax.figures.pipeline import Operation, Pipeline, Pipelines
from ultrascale_jax.parallel.pipeline.table import Schedule
from ultrascale_jax.plan.schedules.measures import Runtime, bubble, held, timeline

NAMES = {"F": "forward", "B": "backward", "W": "weight gradient"}


def drawing(
    schedule: Schedule,
    costs: tuple[float, float, float] = (1.0, 1.0, 1.0),
    runtime: Runtime = "lockstep",
) -> Pipeline:
    """Draw a table as the playbook draws pipelines; costs and runtime as in `measures.bubble`."""
    virtual = f", {schedule.virtual} stages a rank" if schedule.virtual > 1 else ""
    how = {
        "dependencies": "with true dependencies alone",
        "lockstep": "in lock step: an operation takes its time on all ranks as soon as one runs it",
    }[runtime]
    f, b, w = costs
    ops = timeline(schedule, *costs, runtime)
    names = NAMES | ({"B": "input gradient"} if schedule.split else {})
    return Pipeline(
        name=f"schedule_{schedule.name}",
        title=f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} micro-batches{virtual}",
        caption=f"Every rank's operations {how}. Forward {f:g}, input gradient {b:g}, weight gradient {w:g}; idle is "
        f"{bubble(schedule, *costs, runtime):.1%} of the work.",
        operations=[
            Operation(
                op.rank, op.kind, op.microbatch, schedule.chunk_of(op.stage), op.start, op.end
            )
            for op in ops
        ],
        ranks=schedule.ranks,
        chunks=schedule.virtual,
        kinds={kind: names[kind] for kind in schedule.kinds},
        unit="time, in forward passes of a rank" if f == 1 else "time",
    )


def comparison(
    tables: Sequence[Schedule], costs: tuple[float, float, float], runtime: Runtime
) -> Pipelines:
    """Draw tables one above the other; costs and runtime as in `measures.bubble`."""
    how = "true dependencies alone" if runtime == "dependencies" else "lock step"
    f, b, w = costs
    panels = {}
    for table in tables:
        virtual = f", {table.virtual} stages a rank" if table.virtual > 1 else ""
        kept = max(held(table)) / table.virtual
        words = f"bubble {bubble(table, *costs, runtime):.1%}, keeps {kept:g} micro-batches"
        panels[f"{table.name}{virtual}: {words}"] = drawing(table, costs, runtime)
    first = tables[0]
    return Pipelines(
        name="schedules",
        title=f"{first.ranks} ranks, {first.microbatches} micro-batches, {how}",
        caption=f"Every rank's operations by schedule, {how}. Forward {f:g}, input gradient {b:g}, weight gradient "
        f"{w:g}. A bubble is idle over ideal time; a rank keeps so many micro-batches through all of its layers.",
        panels=panels,
    )
