"""The memory formulas beside XLA: `python -m scripts.validation.memory_table --out docs/planning/memory_xla.csv`.

Compiles the training step of every run of `RUNS` for H100s that are not there (10 to 20 s each), writes XLA's bytes as
CSV, and prints the formulas' errors. Rows that the file has already are kept; Ctrl-C loses nothing but the row at work.
"""

import argparse
import csv
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Sequence
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
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.workload import Run

# held model mesh seq_len sequences microbatches zero remat document_mask. The formulas were derived from the rows
# without `held`; the others were looked at only for their error, and the last eleven are drawn at random.
RUNS = """
-    SMOLLM2_135M dp=8                   4096  8 1 0 none                       off
-    SMOLLM2_135M fsdp=8                 8192  4 4 3 selective                  on
held SMOLLM2_135M dp=8                   4096 16 2 0 full                       on
-    LLAMA32_1B   fsdp=8                 8192  1 8 3 selective                  on
-    LLAMA32_1B   dp=8                   4096  1 1 0 none                       off
held LLAMA32_1B   dp=8                   4096  4 4 0 selective                  off
-    LLAMA32_1B   fsdp=8                 4096  2 1 1 none                       on
-    LLAMA32_1B   fsdp=8                 8192  2 4 1 selective                  off
held LLAMA32_1B   fsdp=8                 8192  2 4 2 full                       off
-    LLAMA32_1B   fsdp=64               16384  1 1 3 full                       on
-    LLAMA32_1B   fsdp=8                 4096  4 1 3 dots                       off
held LLAMA32_1B   dp=8,fsdp=8            8192  2 1 3 save:q,k,v,attn_core       off
-    LLAMA32_1B   fsdp=2,tp=4            8192  4 1 3 none                       off
-    LLAMA32_1B   fsdp=4,sp=2            8192  4 2 1 selective                  off
held LLAMA32_1B   fsdp=8                32768  1 1 3 full                       off
-    LLAMA32_1B   fsdp=4,cp=2            4096  1 1 3 selective                  off
-    LLAMA3_8B    fsdp=8                 8192  1 1 3 full                       on
-    LLAMA3_8B    fsdp=8                 8192  1 1 3 selective                  off
-    LLAMA3_8B    fsdp=8                 4096  2 1 3 none                       off
-    LLAMA3_8B    fsdp=8                 4096  1 4 2 full                       off
-    LLAMA3_8B    fsdp=8                 4096  1 2 1 full                       off
-    LLAMA3_8B    sp=8                   4096  4 1 3 none                       off
-    LLAMA3_8B    tp=8                   4096  2 2 0 selective                  off
-    LLAMA3_8B    fsdp=2,tp=4            8192  2 1 3 full                       off
-    LLAMA3_8B    fsdp=4,sp=2            8192  2 2 3 selective                  on
-    LLAMA3_8B    fsdp=64                8192  2 1 3 selective                  off
held LLAMA3_8B    dp=8,fsdp=8            8192  1 2 3 selective                  on
-    LLAMA3_8B    fsdp=64                8192  1 4 1 selective                  off
-    LLAMA3_8B    fsdp=512               8192  1 1 3 selective                  off
held LLAMA3_8B    fsdp=16,sp=8          32768  1 1 3 full                       off
-    LLAMA3_8B    fsdp=4,sp=2            4096  4 1 3 dots                       off
-    LLAMA3_8B    fsdp=4,cp=2            4096  1 1 3 full                       off
-    QWEN3_8B     fsdp=8                 8192  1 1 3 selective                  on
-    QWEN3_8B     fsdp=32,sp=2           8192  2 4 2 selective                  off
-    QWEN3_8B     fsdp=8                 8192  2 1 3 save:q,k,v,attn_core,gate  off
-    QWEN3_8B     fsdp=8,sp=8           16384  1 1 3 dots                       off
-    QWEN3_8B     fsdp=64                8192  1 1 3 none                       off
-    QWEN3_32B    fsdp=8,sp=4            8192  1 4 3 full                       on
-    QWEN3_32B    fsdp=64                4096  1 1 3 full                       off
-    QWEN3_32B    fsdp=64,sp=4           8192  1 2 3 selective                  off
-    QWEN3_32B    fsdp=16,sp=8           4096  1 4 1 full                       off
held QWEN3_32B    fsdp=256               4096  1 1 3 selective                  off
-    LLAMA3_70B   fsdp=8,sp=8            8192  1 4 3 full                       on
-    LLAMA3_70B   fsdp=64,sp=8           8192  1 2 3 full                       off
-    LLAMA3_70B   fsdp=64                8192  1 1 3 full                       off
-    LLAMA3_70B   fsdp=128,sp=4          8192  1 1 3 selective                  off
-    LLAMA3_70B   fsdp=32,tp=8           4096  1 1 3 none                       off
held LLAMA3_70B   fsdp=16,sp=8           4096  1 4 2 full                       off
-    LLAMA3_70B   dp=4,fsdp=16,sp=8      8192  1 2 3 selective                  off
-    LLAMA3_70B   fsdp=64,sp=8          32768  1 1 1 full                       off
held LLAMA3_70B   fsdp=8,sp=8            4096  2 2 3 save:attn_out,mlp_out      off
-    LLAMA3_405B  fsdp=64,sp=8           8192  1 4 3 full                       on
-    LLAMA3_405B  fsdp=64,sp=8           4096  1 1 3 full                       off
held LLAMA3_405B  fsdp=128,sp=4          8192  1 1 3 full                       off
-    LLAMA3_405B  dp=2,fsdp=32,sp=8      8192  1 2 3 full                       off
-    LLAMA3_405B  fsdp=512               4096  1 1 3 full                       off
held LLAMA3_405B  fsdp=64,sp=8           8192  1 1 3 selective                  off
-    LLAMA3_405B  fsdp=32,tp=8           4096  1 1 3 full                       off
-    LLAMA32_1B   fsdp=4,cp=2            4096  1 1 3 none                       off
-    LLAMA3_8B    fsdp=8                 8192  1 2 3 save:q,k,v+offload:gate,up off
held LLAMA32_1B   fsdp=2,cp=4            8192  1 2 3 full                       on
held LLAMA32_1B   fsdp=8,tp=2            4096  4 2 1 dots                       on
held LLAMA3_8B    fsdp=16                8192  2 2 3 selective                  off
held LLAMA3_8B    fsdp=8                 8192  2 1 2 full                       off
held QWEN3_8B     dp=2,tp=4              4096  2 1 0 selective                  off
held QWEN3_8B     fsdp=16                4096  2 4 2 none                       on
held QWEN3_32B    fsdp=32,sp=8          16384  1 2 3 dots                       off
held LLAMA3_70B   fsdp=32,sp=8           8192  1 2 3 selective                  on
held LLAMA3_70B   fsdp=256               8192  1 1 3 full                       off
held QWEN3_32B    fsdp=8,sp=8           16384  1 2 1 none                       off
held LLAMA3_70B   dp=2,fsdp=64,sp=2     16384  1 2 3 dots                       on
held QWEN3_32B    dp=2,fsdp=4,sp=8       4096  4 1 3 selective                  off
held LLAMA3_8B    dp=2,fsdp=4,tp=4       4096  1 1 3 selective                  on
held LLAMA32_1B   fsdp=16,cp=2          16384  2 1 3 full                       on
held LLAMA3_70B   dp=2,fsdp=16,sp=4     16384  4 2 3 full                       off
held QWEN3_32B    dp=2,fsdp=16,sp=8      4096  4 2 3 selective                  off
held QWEN3_8B     fsdp=64               16384  1 1 3 save:q,k,v,attn_core       on
held LLAMA3_8B    dp=2,fsdp=64,tp=4      8192  1 2 0 full                       on
held LLAMA3_8B    fsdp=4,cp=2,sp=8      16384  1 1 1 full                       off
held QWEN3_32B    dp=2,fsdp=8,sp=2,tp=2 16384  2 1 3 save:q,k,v,attn_core       on
""".strip().splitlines()

NAMES = (
    *("held", "model", "mesh", "seq_len", "sequences", "microbatches", "zero", "remat"),
    "document_mask",
)
type Measure = Callable[[dict[str, str]], dict[str, str]]
"""Adds columns to a row."""

BYTES = ("argument_bytes", "temporary_bytes", "xla_bytes", "formula_bytes")


def config(row: dict[str, str]) -> tuple[Config, int]:
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


def measure(row: dict[str, str]) -> dict[str, str]:
    """The row with XLA's bytes."""
    from ultrascale_jax.plan.compiled.compile import compile_step

    step = compile_step(*config(row), estimates=False)
    values = (step.argument_bytes, step.temporary_bytes, step.peak_bytes)
    return row | dict(zip(BYTES, map(str, values), strict=False))


def with_formula(row: dict[str, str]) -> dict[str, str]:
    """The row with the formula's bytes and its error in percent."""
    formula = breakdown(Run.of(*config(row))).peak_bytes
    error = 100 * (formula / int(row["xla_bytes"]) - 1)
    return row | {"formula_bytes": str(formula), "error_pct": f"{error:.1f}"}


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file, if there is one."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Table:
    """A CSV file with a row for each run, in their order."""

    def __init__(
        self,
        path: Path,
        names: Sequence[str],
        measured: Sequence[str],
        runs: Sequence[dict[str, str]],
    ):
        """`names` are the columns that make a run, after the first; `measured` those that follow."""
        self.path, self.columns, self.names = path, (*names, *measured), names[1:]
        self.runs = runs
        known = {self.key(row): row for row in read(path)}
        self.rows = [known[self.key(run)] | run for run in runs if self.key(run) in known]

    def key(self, row: dict[str, str]) -> tuple[str, ...]:
        """What makes a row the same run as another."""
        return tuple(row[name] for name in self.names)

    def fill(self, measure: Measure, with_formula: Measure, limit: int) -> None:
        """Measure up to `limit` of the runs that are not there, write each at once, and all formulas anew."""
        known = {self.key(row): row for row in self.rows}
        for run in [run for run in self.runs if self.key(run) not in known][:limit]:
            print(" ".join(self.key(run)), file=sys.stderr)
            known[self.key(run)] = measure(run)
            self._write(known, with_formula)
        self._write(known, with_formula)

    def _write(self, known: dict[tuple[str, ...], dict[str, str]], with_formula: Measure) -> None:
        rows = (known[self.key(run)] for run in self.runs if self.key(run) in known)
        self.rows = [with_formula(row) for row in rows]
        partial = self.path.with_suffix(".partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
        partial.replace(self.path)


def runs() -> list[dict[str, str]]:
    """`RUNS` as rows."""
    return [dict(zip(NAMES, line.split(), strict=True)) for line in RUNS]


def summary(rows: list[dict[str, str]]) -> str:
    """Median and worst error of the rows that the formulas were derived from, the others, and all, as Markdown."""
    lines = ["| rows | number | median error | worst error |", "|---|---|---|---|"]
    for name, kinds in (("derived from", "-"), ("held out", "held"), ("all", ("-", "held"))):
        errors = [abs(float(row["error_pct"])) for row in rows if row["held"] in kinds]
        if errors:
            lines.append(f"| {name} | {len(errors)} | {median(errors):.1f}% | {max(errors):.1f}% |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the CSV")
    parser.add_argument("--limit", type=int, default=len(RUNS), help="compile at most so many rows")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"  # no driver is asked for, and the plugin still compiles
    table = Table(arguments.out, NAMES, (*BYTES, "error_pct"), runs())
    table.fill(measure, with_formula, arguments.limit)
    print(summary(table.rows))


if __name__ == "__main__":
    main()
