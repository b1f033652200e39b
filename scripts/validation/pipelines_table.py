"""Pipelines beside XLA: `python -m scripts.validation.pipelines_table --out docs/planning/pipelines.csv`.

Compiles the training step of every run of `RUNS` for H100s that are not there (15 to 60 s each), writes XLA's bytes,
the simulated seconds of a step and both by formula as CSV, and prints how memory and compile time grow with the
micro-batches. Rows that the file has already are kept; Ctrl-C loses nothing but the row at work.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.validation import memory_table
from ultrascale_jax.figures.charts import Lines, Point
from ultrascale_jax.parallel.pipeline.schedules import of_config
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.workload import GIB, Run

# Every schedule for lock step with more and more micro-batches, one sequence of 4,096 tokens each.
GROWING = [
    f"-    LLAMA3_8B  pp=4,fsdp=2  {schedule}  residuals  4096 1 {m} 3 full off"
    for schedule in ("afab 0", "1f1b 0", "interleaved 2", "zb_uniform 2")
    for m in (8, 16, 32, 64)
]

# held model mesh schedule virtual stash seq_len sequences microbatches zero remat document_mask, as in memory_table.py.
RUNS = [
    *GROWING,
    *"""
-    LLAMA3_8B   pp=2,fsdp=2,sp=2   1f1b        0 residuals 4096 1  8 3 full      off
-    LLAMA3_8B   pp=2,fsdp=2,sp=2   zb_uniform  0 residuals 4096 1  8 3 selective off
-    LLAMA3_8B   pp=4,fsdp=2        interleaved 2 residuals 4096 1  8 3 selective off
-    LLAMA3_8B   pp=2,fsdp=4        1f1b        0 residuals 4096 1  8 1 selective off
-    LLAMA3_8B   pp=2,fsdp=4        1f1b        0 residuals 4096 1  8 2 dots      off
-    LLAMA32_1B  pp=2,fsdp=4        1f1b        0 residuals 4096 1  8 3 none      off
-    LLAMA32_1B  pp=2,fsdp=4        1f1b        0 input     4096 1  8 3 none      off
held LLAMA3_8B   pp=4,tp=8          1f1b        0 residuals 4096 1  8 0 full      off
held LLAMA32_1B  pp=4,fsdp=2        zb_uniform  2 residuals 8192 1  8 3 full      on
held QWEN3_8B    pp=4,dp=2,fsdp=2   interleaved 3 residuals 4096 1  8 1 full      off
held QWEN3_8B    pp=2,fsdp=4,cp=2   1f1b        0 residuals 8192 1  4 3 full      on
held QWEN3_32B   pp=4,fsdp=2,sp=8   interleaved 2 residuals 4096 1 16 3 selective off
held LLAMA3_70B  pp=4,fsdp=2,sp=8   1f1b        0 residuals 8192 1 16 3 full      on
held LLAMA3_70B  pp=8,fsdp=1,sp=8   interleaved 2 input     4096 1 16 0 dots      off
held LLAMA3_405B pp=16,fsdp=8,sp=8  1f1b        0 input     8192 1 32 3 selective off
held LLAMA3_405B pp=16,fsdp=8,sp=8  interleaved 2 residuals 8192 1 32 3 full      on
""".strip().splitlines(),
]

NAMES = ("held", "model", "mesh", "schedule", "virtual", "stash", *memory_table.NAMES[3:])
MEASURED = (*memory_table.BYTES, "error_pct", "compile_s", "step_s", "formula_step_s")


def runs() -> Iterator[dict[str, str]]:
    """`RUNS` as rows."""
    return (dict(zip(NAMES, line.split(), strict=True)) for line in RUNS)


def compiled(row: dict[str, str]) -> tuple[Any, Any]:
    """The `CompiledStep` of a row and its `Timeline`."""
    from ultrascale_jax.plan.compiled.compile import compile_step, simulate_step

    cfg, num_gpus = memory_table.config(row)
    step = compile_step(cfg, num_gpus)
    return step, simulate_step(step, find_cluster(None, "h100", num_gpus))


def measure(row: dict[str, str]) -> dict[str, str]:
    """The row with XLA's bytes, its seconds to compile, and the simulated seconds of a step."""
    return row | values(*compiled(row))


def values(step: Any, timeline: Any) -> dict[str, str]:
    """What `compiled` found, by column."""
    found = {
        "argument_bytes": step.argument_bytes,
        "temporary_bytes": step.temporary_bytes,
        "xla_bytes": step.peak_bytes,
        "compile_s": f"{step.compile_s:.0f}",
        "step_s": f"{timeline.step_s:.3f}",
    }
    return {name: str(value) for name, value in found.items()}


def with_formula(row: dict[str, str]) -> dict[str, str]:
    """The row with what the formulas say."""
    run = Run.of(*memory_table.config(row))
    seconds = estimate(run, find_cluster(None, "h100", run.num_gpus)).step_s
    return memory_table.with_formula(row) | {"formula_step_s": f"{seconds:.3f}"}


def growth(rows: list[dict[str, str]]) -> str:
    """GiB and seconds to compile by schedule and micro-batches, as Markdown."""
    found = {(row["schedule"], int(row["microbatches"])): row for row in rows[: len(GROWING)]}
    counts = sorted({m for _, m in found})
    lines = ["| | " + " | ".join(f"m {m}" for m in counts) + " |", "|---|" + "---|" * len(counts)]
    for schedule in dict.fromkeys(schedule for schedule, _ in found):
        cells = []
        for m in counts:
            row = found.get((schedule, m))
            size = int(row["xla_bytes"]) / GIB if row else 0
            cells.append(f"{size:.2f} GiB, {row['compile_s']} s" if row else "")
        lines.append(f"| {schedule} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(rows: list[dict[str, str]]) -> Lines:
    """Memory and time of a step over the micro-batches, by schedule; hollow is the time without a bubble."""
    memory: dict[str, list[Point]] = {}
    seconds: dict[str, list[Point]] = {}
    for row in rows[: len(GROWING)]:
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


def fill_and_print(
    doc: str | None,
    names: tuple[str, ...],
    measured: tuple[str, ...],
    runs: list[dict[str, str]],
    measure: Callable[[dict[str, str]], dict[str, Any]],
    text: Callable[[list[dict[str, str]]], str],
) -> None:
    """The command line of a table: fills the CSV, prints the formulas' errors and what `text` makes of the rows."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--out", type=Path, required=True, help="the CSV")
    parser.add_argument("--limit", type=int, default=len(runs), help="compile at most so many rows")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"  # no driver is asked for, and the plugin still compiles
    found = memory_table.Table(arguments.out, names, measured, runs)
    found.fill(measure, with_formula, arguments.limit)
    print(memory_table.summary(found.rows), text(found.rows), sep="\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the CSV")
    parser.add_argument(
        "--figure", type=Path, help="draw memory and time over the micro-batches, a PNG"
    )
    parser.add_argument("--limit", type=int, default=len(RUNS), help="compile at most so many rows")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"  # no driver is asked for, and the plugin still compiles
    table = memory_table.Table(arguments.out, NAMES, MEASURED, list(runs()))
    table.fill(measure, with_formula, arguments.limit)
    rows = table.rows
    print(memory_table.summary(rows), growth(rows), sep="\n\n")
    if arguments.figure:
        figure(rows).draw(arguments.figure)


if __name__ == "__main__":
    main()
