"""The memory formulas beside XLA: `python -m scripts.validation.memory_table --out docs/planning/memory_xla.csv`.

The rows of docs/planning/memory_xla.csv are the runs: a new one is a line without figures. Compiles the training step
of each for H100s that are not there (10 to 20 s), writes XLA's bytes, and prints the formulas' errors. Rows that FILE
has with their bytes are kept, so another FILE compiles all of them; Ctrl-C loses nothing but the row at work. The
formulas were derived from the rows without `held`; the others were looked at only for their error, and the last eleven
were drawn at random.
"""

import argparse
import csv
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ultrascale_jax.config import (
    Config,
    ContextConfig,
    DataConfig,
    MeshConfig,
    MoEConfig,
    PipelineConfig,
    TrainConfig,
    parse_mesh,
)
from ultrascale_jax.configs import shapes
from ultrascale_jax.figures.figure import Figure
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.workload import Run

PLANNING = Path(__file__).parents[2] / "docs" / "planning"

type Row = dict[str, str]
type Measure = Callable[[Row], Row]
"""Adds columns to a row."""

BYTES = ("argument_bytes", "temporary_bytes", "xla_bytes", "formula_bytes")


def config(row: Row) -> tuple[Config, int]:
    """The run of a row, and its number of GPUs."""
    mesh = MeshConfig(**{"fsdp": 1, **parse_mesh(row["mesh"])})
    microbatches = int(row["microbatches"])
    train = TrainConfig(
        global_batch=int(row["sequences"]) * microbatches * mesh.batch,
        microbatches=microbatches,
        zero=int(row["zero"]),  # pyrefly: ignore
        remat=row["remat"],
    )
    data = DataConfig(seq_len=int(row["seq_len"]), document_mask=row["document_mask"] == "on")
    model, pp = getattr(shapes, row["model"]), PipelineConfig()
    if "schedule" in row:
        stash: Any = row["stash"]
        pp = PipelineConfig(schedule=row["schedule"], virtual=int(row["virtual"]), stash=stash)
    cp = ContextConfig()
    if "strategy" in row:
        strategy: Any = row["strategy"]
        cp = ContextConfig(strategy=strategy, ulysses=int(row["ulysses"]))
    moe = MoEConfig()
    if "dispatch" in row:
        way: Any = row["dispatch"]
        overlap = row["overlap"] == "on"
        moe = MoEConfig(dispatch=way, a2a_groups=int(row["nodes"]), overlap=overlap)
    if row.get("layers", "all") != "all":
        dense, others = map(int, row["layers"].split("+"))
        experts = dataclasses.replace(model.experts, dense_layers=dense)
        model = dataclasses.replace(model, num_layers=dense + others, experts=experts)
    cfg = Config(model=model, mesh=mesh, data=data, train=train, pp=pp, cp=cp, moe=moe)
    return cfg, math.prod(mesh.sizes.values())


def measure(row: Row) -> Row:
    """The row with XLA's bytes."""
    from ultrascale_jax.plan.compiled.compile import compile_step

    step = compile_step(*config(row), estimates=False)
    values = (step.argument_bytes, step.temporary_bytes, step.peak_bytes)
    return row | dict(zip(BYTES, map(str, values), strict=False))


def with_formula(row: Row) -> Row:
    """The row with the formula's bytes and its error in percent."""
    formula = breakdown(Run.of(*config(row))).peak_bytes
    error = 100 * (formula / int(row["xla_bytes"]) - 1)
    return row | {"formula_bytes": str(formula), "error_pct": f"{error:.1f}"}


def read(path: Path) -> list[Row]:
    """The rows of a file, if there is one."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def key(row: Row) -> tuple[str, ...]:
    """Identify a row's run: its columns between `held` and the figures."""
    names = list(row)
    return tuple(row[name] for name in names[1 : names.index(BYTES[0])])


def fill(
    path: Path, runs: Sequence[Row], measure: Measure, with_formula: Measure, limit: int
) -> list[Row]:
    """Measure up to `limit` of `runs` that `path` does not have, write each at once, and all formulas anew.

    The rows of `path` are in the order of `runs`, and have their columns.
    """
    known = {key(row): row for row in read(path) if row[BYTES[0]]}

    def write() -> list[Row]:
        rows = [with_formula(run | known[key(run)]) for run in runs if key(run) in known]
        partial = path.with_suffix(".partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(runs[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        partial.replace(path)
        return rows

    for run in [run for run in runs if key(run) not in known][:limit]:
        print(" ".join(key(run)), file=sys.stderr)
        known[key(run)] = measure(run)
        write()
    return write()


def markdown(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def summary(rows: Sequence[Row]) -> str:
    """Median and worst error of the rows that the formulas were derived from, the others, and all, as Markdown."""
    found = []
    for name, kinds in (("derived from", "-"), ("held out", "held"), ("all", ("-", "held"))):
        errors = [abs(float(row["error_pct"])) for row in rows if row["held"] in kinds]
        if errors:
            found.append((name, len(errors), f"{median(errors):.1f}%", f"{max(errors):.1f}%"))
    return markdown(("rows", "number", "median error", "worst error"), found)


def command(
    doc: str | None,
    name: str,
    measure: Measure,
    with_formula: Measure,
    text: Callable[[list[Row]], str] | None = None,
    figure: Callable[[list[Row]], Figure] | None = None,
) -> None:
    """Be the command of the table docs/planning/NAME: fill it, print the formulas' errors and `text` of its rows."""
    runs = read(PLANNING / name)
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the CSV")
    parser.add_argument("--limit", type=int, default=len(runs), help="compile at most so many rows")
    if figure is not None:
        parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the rows, a PNG")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"  # no driver is asked for, and the plugin still compiles
    rows = fill(arguments.out, runs, measure, with_formula, arguments.limit)
    print(summary(rows), *([text(rows)] if text else []), sep="\n\n")
    if figure is not None and arguments.figure:
        figure(rows).draw(arguments.figure)


if __name__ == "__main__":
    command(__doc__, "memory_xla.csv", measure, with_formula)
