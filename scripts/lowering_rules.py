"""Compile runs for H100s with each rule of `config/lowering.py` off, simulate them, and print what each rule brings.

python -m scripts.lowering_rules              # the rows that docs/benchmarks/lowering.csv lacks, into it
python -m scripts.lowering_rules --runs 8b    # of one run
"""

import argparse
import csv
import dataclasses
import importlib
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale_jax.config import Config, Keep, MeshConfig
from ultrascale_jax.config import lowering as rules
from ultrascale_jax.launch.distributed import set_environment
from ultrascale_jax.plan.auto import choose_auto
from ultrascale_jax.plan.hardware import find_cluster

TABLE = Path("docs/benchmarks/lowering.csv")
PLAIN = "all of them"
"""Name of the row of a run without any rule."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe on a mesh."""

    recipe: str
    mesh: str
    train: dict | None = None
    """Fields that differ from the recipe's; None: the recipe, and `auto` chooses the open ones."""


CASES = {
    "1b": Case(recipe="llama32_1b", mesh="dp=1", train={"global_batch": 4, "remat": "selective"}),
    "8b": Case(recipe="llama3_8b", mesh="fsdp=8", train={"global_batch": 8, "remat": "dots"}),
    "8b_2": Case(recipe="llama3_8b", mesh="fsdp=8", train={"global_batch": 16, "remat": "dots"}),
    "8b_selective": Case(recipe="llama3_8b", mesh="fsdp=8", train={"global_batch": 8, "remat": "selective"}),
    "8b_sp": Case(recipe="llama3_8b", mesh="fsdp=4,sp=2", train={"global_batch": 8, "remat": "selective"}),
    "8b_dp": Case(recipe="llama3_8b", mesh="dp=8,fsdp=8", train={"global_batch": 64, "remat": "full"}),
    "8b_fp8": Case(
        recipe="llama3_8b",
        mesh="fsdp=8",
        train={"global_batch": 8, "remat": "full", "precision": "fp8"},
    ),
    "70b": Case(recipe="llama3_70b", mesh="fsdp=256,sp=2", train={"global_batch": 256, "remat": "dots"}),
    "70b_dp": Case(recipe="llama3_70b", mesh="dp=8,fsdp=64", train={"global_batch": 512, "remat": "full"}),
    "70b_pp": Case(
        recipe="llama3_70b",
        mesh="pp=4,fsdp=16,sp=8",
        train={"global_batch": 256, "microbatches": 16, "remat": "full", "zero": 1},
    ),
    "405b": Case(
        recipe="llama3_405b",
        mesh="fsdp=128,sp=8",
        train={"global_batch": 128, "remat": Keep(saved=("attn_out",), offloaded=("gate", "up"))},
    ),
    "405b_full": Case(recipe="llama3_405b", mesh="fsdp=128,sp=8", train={"global_batch": 128, "remat": "full"}),
    "128k": Case(recipe="llama3_8b_128k", mesh="cp=8,fsdp=4", train={"global_batch": 4, "remat": "full"}),
    "1m": Case(recipe="llama3_8b_1m", mesh="cp=32,fsdp=2", train={"global_batch": 2, "remat": "full"}),
    "mixtral": Case(recipe="mixtral_8x7b", mesh="fsdp=8,ep=8", train={"global_batch": 64, "remat": "full"}),
    "mixtral_recipe": Case(recipe="mixtral_8x7b", mesh="fsdp=8,ep=8"),
    "deepseek_recipe": Case(recipe="deepseek_v3", mesh="pp=8,fsdp=4,ep=64"),
    "mixtral_pp": Case(
        recipe="mixtral_8x7b",
        mesh="pp=4,fsdp=2,ep=8",
        train={"global_batch": 128, "microbatches": 8, "remat": "full", "zero": 1},
    ),
}  # fmt: skip
"""Runs that together meet the condition of every rule."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One compiled program."""

    case: str
    without: str
    """The rule that is off; empty: none."""
    step_s: float = 0.0
    peak_gib: float = 0.0
    error: str = ""


def config_of(case: Case) -> Config:
    """Return the checked configuration of a case."""
    recipe = importlib.import_module(f"ultrascale_jax.configs.{case.recipe}").config
    cfg = dataclasses.replace(recipe, mesh=MeshConfig.parse(case.mesh))
    devices = num_devices(cfg)
    if case.train is None:
        return choose_auto(cfg, find_cluster(None, "h100", devices))[0].check(devices)
    train = dataclasses.replace(cfg.train, **{"microbatches": 1, **case.train})
    return dataclasses.replace(cfg, train=train).check(devices)


def num_devices(cfg: Config) -> int:
    """Return the GPUs of a run whose mesh has no open axis."""
    return math.prod(cfg.mesh.sizes.values())


def applied(cfg: Config) -> list[str]:
    """Return the rules that change this run."""
    whole = rules.Lowering.of(cfg)
    return [r.name for r in rules.RULES if rules.Lowering.of(cfg, without=[r.name]) != whole]


def measure(name: str, without: str) -> Row:
    """Compile and simulate one case without a rule; call it in a process of its own."""
    import jax

    from ultrascale_jax.plan.compiled.compile import compile_step, simulate_step

    jax.config.update("jax_enable_compilation_cache", False)
    cfg = config_of(CASES[name])
    if without == PLAIN:
        cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, lowering="plain"))
    elif without:
        rules.RULES = tuple(rule for rule in rules.RULES if rule.name != without)
        rules.choose.cache_clear()
    devices = num_devices(cfg)
    try:
        step = compile_step(cfg, devices, "h100")
        timeline = simulate_step(step, find_cluster(None, "h100", devices))
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        return Row(case=name, without=without, error=text)
    peak = step.peak_bytes + step.workspace_bytes
    return Row(case=name, without=without, step_s=timeline.step_s, peak_gib=peak / 2**30)


def table(rows: Sequence[Row]) -> str:
    """Return a table of the runs to which each rule brings most and least, `without -> with`."""
    whole = {row.case: row.step_s for row in rows if not row.without}
    lines = ["| rule | runs | most | least |", "|---|---|---|---|"]
    for name in [PLAIN, *(rule.name for rule in rules.RULES)]:
        gains = sorted(
            (1 - whole[row.case] / row.step_s, row.case, row.step_s)
            for row in rows
            if row.without == name and not row.error
        )
        if gains:
            cells = [
                f"{case} {1e3 * step_s:,.0f} -> {1e3 * whole[case]:,.0f} ms, {gain:+.1%}"
                for gain, case, step_s in (gains[-1], gains[0])
            ]
            lines.append(f"| {name} | {len(gains)} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def read_rows() -> list[Row]:
    """Read the rows that were measured before."""
    with TABLE.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row |= {name: float(row[name]) for name in ("step_s", "peak_gib")}
    return [Row(**row) for row in rows]


def write_rows(rows: Sequence[Row]) -> None:
    """Write all rows."""
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, [f.name for f in dataclasses.fields(Row)], lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(map(dataclasses.asdict, rows))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--anew", action="store_true", help="measure rows of the table again")
    options = parser.parse_args(argv)
    os.environ |= {"JAX_PLATFORMS": "cpu"}
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    set_environment(os.environ)
    rows = {(row.case, row.without): row for row in read_rows()}
    jobs = [
        (name, without)
        for name in options.runs
        for without in ["", *applied(config_of(CASES[name])), PLAIN]
        if options.anew or (name, without) not in rows
    ]
    start, context = time.perf_counter(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for row in pool.map(measure, *zip(*jobs, strict=True)) if jobs else ():
            rows[row.case, row.without] = row
            print(f"{time.perf_counter() - start:6.0f} s  {row}", file=sys.stderr, flush=True)
            write_rows(list(rows.values()))
    print(table(list(rows.values())))


if __name__ == "__main__":
    main()
