"""Compare the planner's formulas with XLA: `python -m scripts.validation.xla_tables NAME`.

    memory_xla  memory, 10 to 20 s a row
    pipelines   with the simulated seconds of a step and those by formula, 15 to 60 s a row
    experts     with the seconds of a step that wait for communication; `layers` are dense ones + those with experts
    context     the same for long sequences
    peers       published runs of other trainers in their own configurations as our programs, each compared with ours

The rows of docs/planning/NAME.csv are the runs: a new one is a line without figures. Compiles the training step of each
such row for H100s that are not there (with `--anew` of all), writes XLA's bytes, and the formulas' of all rows; Ctrl-C
loses nothing but the row at work. The formulas were derived from the rows without `held`; the others were looked at
only for their error, and the last eleven of memory_xla were drawn at random.
"""

import argparse
import csv
import dataclasses
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.workload import Run

NAMES = ("memory_xla", "pipelines", "context", "experts", "peers")
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
        precision=row.get("precision", "bf16"),  # pyrefly: ignore
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
        moe = MoEConfig(
            a2a_groups=int(row["nodes"]),
            overlap=row["overlap"] == "on",
            capacity_factor=float(row.get("capacity", MoEConfig.capacity_factor)),
        )
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
    formula = breakdown(run).planned_bytes
    error = 100 * (formula / int(row["xla_bytes"]) - 1)
    columns = {"formula_bytes": str(formula), "error_pct": f"{error:.1f}"}
    if "formula_step_s" in row:
        seconds = estimate(run, find_cluster(None, "h100", run.num_gpus)).step_s
        columns["formula_step_s"] = f"{seconds:.3f}"
    return row | columns


def read(path: Path) -> list[Row]:
    """Read the rows of a file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to a file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--anew", action="store_true", help="compile rows that have bytes again")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"  # no driver is needed, and the plugin still compiles
    path = PLANNING / f"{arguments.name}.csv"
    rows = read(path)
    for n, row in enumerate(rows):
        if arguments.anew or not row["xla_bytes"]:
            print(*row.values(), file=sys.stderr)
            rows[n] = measure(row)
            write(path, rows)
    write(path, [with_formula(row) if row["xla_bytes"] else row for row in rows])


if __name__ == "__main__":
    main()
