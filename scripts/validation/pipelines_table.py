"""Pipelines beside XLA: `python -m scripts.validation.pipelines_table --out docs/planning/pipelines.csv`.

As memory_table.py (15 to 60 s a row), with the simulated seconds of a step and those by formula. Prints how memory and
compile time grow with the micro-batches; --figure draws it.
"""

from collections.abc import Sequence
from typing import Any

from scripts.validation import memory_table
from scripts.validation.memory_table import Row
from ultrascale_jax.figures.charts import Lines, Point
from ultrascale_jax.parallel.pipeline.schedules import of_config
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.workload import GIB, Run


def growing(rows: Sequence[Row]) -> list[Row]:
    """The rows of every schedule for lock step with more and more micro-batches, one sequence of 4,096 tokens each."""
    wanted = {"model": "LLAMA3_8B", "mesh": "pp=4,fsdp=2", "remat": "full"}
    return [row for row in rows if wanted.items() <= row.items()]


def compiled(row: Row) -> tuple[Any, Any]:
    """The `CompiledStep` of a row and its `Timeline`."""
    from ultrascale_jax.plan.compiled.compile import compile_step, simulate_step

    cfg, num_gpus = memory_table.config(row)
    step = compile_step(cfg, num_gpus)
    return step, simulate_step(step, find_cluster(None, "h100", num_gpus))


def measure(row: Row) -> Row:
    """The row with XLA's bytes, its seconds to compile, and the simulated seconds of a step."""
    return row | values(*compiled(row))


def values(step: Any, timeline: Any) -> Row:
    """The compiled program's figures, by column."""
    found = {
        "argument_bytes": step.argument_bytes,
        "temporary_bytes": step.temporary_bytes,
        "xla_bytes": step.peak_bytes,
        "compile_s": f"{step.compile_s:.0f}",
        "step_s": f"{timeline.step_s:.3f}",
    }
    return {name: str(value) for name, value in found.items()}


def with_formula(row: Row) -> Row:
    """The row with what the formulas say."""
    run = Run.of(*memory_table.config(row))
    seconds = estimate(run, find_cluster(None, "h100", run.num_gpus)).step_s
    return memory_table.with_formula(row) | {"formula_step_s": f"{seconds:.3f}"}


def growth(rows: Sequence[Row]) -> str:
    """GiB and seconds to compile by schedule and micro-batches, as Markdown."""
    found = {(row["schedule"], int(row["microbatches"])): row for row in growing(rows)}
    counts = sorted({m for _, m in found})
    lines = []
    for schedule in dict.fromkeys(schedule for schedule, _ in found):
        cells = [schedule]
        for m in counts:
            row = found.get((schedule, m))
            size = int(row["xla_bytes"]) / GIB if row else 0
            cells.append(f"{size:.2f} GiB, {row['compile_s']} s" if row else "")
        lines.append(cells)
    return memory_table.markdown(["schedule", *(f"m {m}" for m in counts)], lines)


def figure(rows: Sequence[Row]) -> Lines:
    """Memory and time of a step over the micro-batches, by schedule; hollow is the time without a bubble."""
    memory: dict[str, list[Point]] = {}
    seconds: dict[str, list[Point]] = {}
    for row in growing(rows):
        m, step_s = int(row["microbatches"]), float(row["step_s"])
        ideal = step_s / (1 + of_config(memory_table.config(row)[0]).bubble())
        memory.setdefault(row["schedule"], []).append(Point(x=m, y=int(row["xla_bytes"]) / GIB))
        seconds.setdefault(row["schedule"], []).append(Point(x=m, y=1e3 * step_s / m))
        seconds.setdefault(f"{row['schedule']}, ideal", []).append(
            Point(x=m, y=1e3 * ideal / m, solid=False)
        )
    return Lines(
        name="pipelines",
        title="Llama 3 8B on 8 H100s, pp 4 x fsdp 2: memory and time over the micro-batches",
        caption="From docs/planning/pipelines.csv: XLA's peak, and the simulated step divided by the micro-batches.",
        panels={"GiB on a GPU": memory, "ms a micro-batch": seconds},
        x="micro-batches of a step",
        y="",
        hollow="without its bubble",
        scale="none",
    )


if __name__ == "__main__":
    memory_table.command(__doc__, "pipelines.csv", measure, with_formula, growth, figure)
