"""Compare the planner's formulas with XLA: `python -m scripts.validation.xla_tables NAME --out docs/planning/NAME.csv`.

    memory_xla  memory, 10 to 20 s a row
    pipelines   with the simulated seconds of a step and those by formula, 15 to 60 s a row; prints how memory and
                compile time grow with the micro-batches, --figure draws it
    experts     with the seconds of a step that wait for communication; prints the table of
                docs/benchmarks/h100.md. `layers` are dense ones + those with experts
    context     the same for long sequences; prints the table of docs/benchmarks/h100.md

The rows of docs/planning/NAME.csv are the runs: a new one is a line without figures. Compiles the training step of each
for H100s that are not there, writes XLA's bytes, and prints the formulas' errors. Rows that FILE has with their bytes
are kept, so another FILE compiles all of them; Ctrl-C loses nothing but the row at work. The formulas were derived from
the rows without `held`; the others were looked at only for their error, and the last eleven of memory_xla were drawn at
random.
"""

import argparse
import csv
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from docs.drawings.charts import Lines
from scripts.validation import published
from ultrascale_jax.cli.command_line import parse_remat
from ultrascale_jax.config import (
    Config,
    ContextConfig,
    DataConfig,
    MeshConfig,
    MoEConfig,
    PipelineConfig,
    TrainConfig,
)
from ultrascale_jax.configs import shapes
from ultrascale_jax.figures.charts import Point
from ultrascale_jax.parallel.pipeline.schedules import of_config
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster, find_gpu
from ultrascale_jax.plan.schedules.measures import bubble
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.units import GIB

PLANNING = Path(__file__).parents[2] / "docs" / "planning"

type Row = dict[str, str]

BYTES = ("argument_bytes", "temporary_bytes", "xla_bytes", "formula_bytes")

GATHERED = ("all-gather", "reduce-scatter")


def config(row: Mapping[str, Any]) -> tuple[Config, int]:
    """Return the run of a table's row, and its number of GPUs."""
    mesh = MeshConfig.parse(row["mesh"])
    microbatches = int(row["microbatches"])
    train = TrainConfig(
        global_batch=int(row["sequences"]) * microbatches * mesh.batch,
        microbatches=microbatches,
        zero=int(row["zero"]),  # pyrefly: ignore
        remat=parse_remat(row["remat"]),
    )
    data = DataConfig(seq_len=int(row["seq_len"]), document_mask=row["document_mask"] == "on")
    model = getattr(shapes, row["model"])
    pp, cp, moe = PipelineConfig(), ContextConfig(), MoEConfig()
    if "schedule" in row:
        virtual = int(row["virtual"])
        pp = PipelineConfig(schedule=row["schedule"], virtual=virtual, stash=row["stash"])
    if "strategy" in row:
        cp = ContextConfig(strategy=row["strategy"], ulysses=int(row["ulysses"]))
    if "overlap" in row:
        moe = MoEConfig(a2a_groups=int(row["nodes"]), overlap=row["overlap"] == "on")
    if row.get("layers", "all") != "all":
        dense, num_moe = map(int, row["layers"].split("+"))
        experts = dataclasses.replace(model.experts, dense_layers=dense)
        model = dataclasses.replace(model, num_layers=dense + num_moe, experts=experts)
    cfg = Config(model=model, mesh=mesh, data=data, train=train, pp=pp, cp=cp, moe=moe)
    return cfg, math.prod(mesh.sizes.values())


def measure(row: Row) -> Row:
    """Compile a row; add XLA's bytes and, where it has the columns, seconds to compile, of a step, and exposed."""
    from ultrascale_jax.plan.compiled.compile import compile_step, simulate_step

    cfg, num_gpus = config(row)
    step = compile_step(cfg, num_gpus, estimates="step_s" in row)
    sizes = (step.argument_bytes, step.temporary_bytes, step.peak_bytes)
    row = row | dict(zip(BYTES, map(str, sizes), strict=False))
    if "step_s" not in row:
        return row
    timeline = simulate_step(step, find_cluster(None, "h100", num_gpus))
    row |= {"compile_s": f"{step.compile_s:.0f}", "step_s": f"{timeline.step_s:.3f}"}
    if "exposed_s" not in row:
        return row
    # ZeRO's collectives are over fsdp too, unless cp is its only axis.
    if "overlap" in row:
        kinds = ("all-to-all",)
        axis, columns = "ep", {"travel_s": timeline.link_s, "exposed_travel_s": timeline.waited_s}
    else:
        ring = ("collective-permute", "all-to-all")
        kinds = GATHERED if row["strategy"] == "allgather" else ring
        axis, columns = "cp", {"exposed_cp_s": timeline.waited_s}
    row["exposed_s"] = f"{sum(timeline.exposed_s.values()):.4f}"
    return row | {
        name: f"{sum(seconds.get((kind, axis), 0.0) for kind in kinds):.4f}"
        for name, seconds in columns.items()
    }


def with_formula(row: Row) -> Row:
    """Add the formulas' bytes, their error in percent and, where the row has the column, the seconds."""
    run = Run.of(*config(row))
    formula = breakdown(run).peak_bytes
    error = 100 * (formula / int(row["xla_bytes"]) - 1)
    columns = {"formula_bytes": str(formula), "error_pct": f"{error:.1f}"}
    if "formula_step_s" in row:
        seconds = estimate(run, find_cluster(None, "h100", run.num_gpus)).step_s
        columns["formula_step_s"] = f"{seconds:.3f}"
    return row | columns


def read(path: Path) -> list[Row]:
    """Read the rows of a file, if there is one."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows to a file atomically."""
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)


def key(row: Row) -> tuple[str, ...]:
    """Identify a row's run: its columns between `held` and the figures."""
    names = list(row)
    return tuple(row[name] for name in names[1 : names.index(BYTES[0])])


def fill(
    path: Path, runs: Sequence[Row], limit: int, measure: Callable[[Row], Row] = measure
) -> list[Row]:
    """Measure up to `limit` of `runs` that `path` lacks; write each at once, in their order, with all formulas."""
    measured = {key(row): row for row in read(path) if row[BYTES[0]]}

    def finished() -> list[Row]:
        rows = [with_formula(run | measured[key(run)]) for run in runs if key(run) in measured]
        write(path, list(runs[0]), rows)
        return rows

    for run in [run for run in runs if key(run) not in measured][:limit]:
        print(" ".join(key(run)), file=sys.stderr)
        measured[key(run)] = measure(run)
        finished()
    return finished()


def markdown(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Format a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def summary(rows: Sequence[Row]) -> str:
    """Format median and worst error of the rows that the formulas were derived from, the others, and all."""
    lines = []
    for name, kinds in (("derived from", "-"), ("held out", "held"), ("all", ("-", "held"))):
        errors = [abs(float(row["error_pct"])) for row in rows if row["held"] in kinds]
        if errors:
            lines.append((name, len(errors), f"{median(errors):.1f}%", f"{max(errors):.1f}%"))
    return markdown(("rows", "number", "median error", "worst error"), lines)


def growing(rows: Sequence[Row]) -> list[Row]:
    """Return each schedule's rows of a growing number of micro-batches, one sequence of 4,096 tokens each."""
    fields = {"model": "LLAMA3_8B", "mesh": "pp=4,fsdp=2", "remat": "full"}
    return [row for row in rows if fields.items() <= row.items()]


def growth(rows: Sequence[Row]) -> str:
    """Format GiB and seconds to compile by schedule and micro-batches, as Markdown."""
    by_point = {(row["schedule"], int(row["microbatches"])): row for row in growing(rows)}
    counts = sorted({m for _, m in by_point})
    lines = []
    for schedule in dict.fromkeys(schedule for schedule, _ in by_point):
        cells = [schedule]
        for m in counts:
            row = by_point.get((schedule, m))
            size = int(row["xla_bytes"]) / GIB if row else 0
            cells.append(f"{size:.2f} GiB, {row['compile_s']} s" if row else "")
        lines.append(cells)
    return markdown(["schedule", *(f"m {m}" for m in counts)], lines)


def figure(rows: Sequence[Row]) -> Lines:
    """Draw memory and time of a step over the micro-batches, by schedule; hollow is the time without a bubble."""
    memory: dict[str, list[Point]] = {}
    seconds: dict[str, list[Point]] = {}
    for row in growing(rows):
        m, step_s = int(row["microbatches"]), float(row["step_s"])
        ideal = step_s / (1 + bubble(of_config(config(row)[0])))
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


SPEED = ("GiB", "step s", "tokens/s/GPU", "MFU")


def speed(row: Row, run: Run, *shares: str) -> list[str]:
    """Format `SPEED` of a row, and these of its columns as shares of the step."""
    step_s = float(row["step_s"])
    return [
        f"{int(row['xla_bytes']) / GIB:.1f}",
        f"{step_s:.2f}" if "strategy" in row else f"{step_s:.3f}",
        f"{run.step_tokens / step_s / run.num_gpus:,.0f}",
        f"{run.mfu(step_s, find_gpu('h100')):.1%}",
        *(f"{float(row[name]) / step_s:.1%}" for name in shares),
    ]


def ways(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the full Qwen3 30B-A3B on 128 H100s, one for each way to the experts."""
    return [row for row in rows if (row["model"], row["layers"]) == ("QWEN3_30B_A3B", "all")]


def experts(rows: Sequence[Row]) -> str:
    """Format the rows of `ways` as Markdown."""
    lines = []
    for row in ways(rows):
        run = Run.of(*config(row))
        nodes = [f"{row['nodes']} nodes"] if row["nodes"] != "1" else []
        way = [*nodes, *(["overlap"] if row["overlap"] == "on" else [])]
        shares = speed(row, run, "exposed_s", "travel_s", "exposed_travel_s")
        lines.append((run.mesh.ep, ", ".join(way) or "at once", *shares))
    columns = ("ep", "exchange", *SPEED, "exposed", "tokens travel", "of it exposed")
    return markdown(columns, lines)


def context(rows: Sequence[Row]) -> str:
    """Format the rows of Llama 3 8B with one micro-batch and no document mask, as Markdown."""
    peers = {
        (peer.run.shape.d_model, peer.run.mesh, peer.run.seq_len): f"{peer.tokens_per_s_gpu:,.0f}"
        for peer in published.read(PLANNING / "published_runs.csv")
        if peer.software == "torchtitan"
    }
    lines = []
    for row in rows:
        run = Run.of(*config(row))
        if row["model"] != "LLAMA3_8B" or run.document_mask or run.microbatches > 1:
            continue
        cells = (
            f"{run.seq_len:,}",
            run.num_gpus,
            f"`{row['mesh']}`",
            " ".join(run.exchange) or ("zigzag" if run.mesh.cp > 1 else "flash"),
            str(run.remat),
            *speed(row, run, "exposed_s", "exposed_cp_s"),
            peers.get((run.shape.d_model, run.mesh, run.seq_len), ""),
        )
        lines.append(cells)
    head = ("tokens", "GPUs", "mesh", "attention", "remat", *SPEED)
    return markdown((*head, "exposed", "by attention", "torchtitan, fp8"), lines)


TEXTS = {
    "memory_xla": None,
    "pipelines": growth,
    "experts": experts,
    "context": context,
}
"""The tables by name, and the report of each in addition to its errors."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=TEXTS)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the CSV")
    parser.add_argument("--limit", type=int, metavar="N", help="compile at most so many rows")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw pipelines, a PNG")
    arguments = parser.parse_args()
    if arguments.figure and arguments.name != "pipelines":
        parser.error("--figure draws pipelines only")
    os.environ["JAX_PLATFORMS"] = "cpu"  # no driver is asked for, and the plugin still compiles
    runs, text = read(PLANNING / f"{arguments.name}.csv"), TEXTS[arguments.name]
    rows = fill(arguments.out, runs, len(runs) if arguments.limit is None else arguments.limit)
    print(summary(rows), *([text(rows)] if text else []), sep="\n\n")
    if arguments.figure:
        figure(rows).draw(arguments.figure)


if __name__ == "__main__":
    main()
