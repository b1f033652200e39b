"""Compile runs for H100s with each rule of `config/lowering.py` off, simulate them, and print what each rule brings.

python -m scripts.lowering_rules              # the rows that docs/benchmarks/lowering.csv lacks, into it
python -m scripts.lowering_rules --runs 8b    # of one run
"""

import argparse
import dataclasses
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from scripts.validation.xla_tables import Row, read, write
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.config import Config
from ultrascale_jax.config import lowering as rules
from ultrascale_jax.launch.distributed import set_environment
from ultrascale_jax.plan.hardware import Cluster

TABLE = Path(__file__).parents[1] / "docs/benchmarks/lowering.csv"
PLAIN = "all of them"
"""Name of the row of a run without any rule."""


CASES = {row["case"]: row["arguments"] for row in read(TABLE.with_name("lowering_runs.csv"))}
"""Arguments of `plan compile` of runs that together meet the condition of every rule."""


def run_of(case: str) -> tuple[Config, Cluster]:
    """Return the checked configuration of a case, and its machine."""
    cfg, options, cluster = common.parse(CASES[case].split(), "compile", common.Options, "")
    return common.choose_open(cfg, options, cluster).check(cluster.num_gpus), cluster


def applied(cfg: Config) -> list[str]:
    """Return the rules that change this run."""
    whole = rules.Lowering.of(cfg)
    return [r.name for r in rules.RULES if rules.Lowering.of(cfg, without=[r.name]) != whole]


def measure(name: str, without: str) -> Row:
    """Compile and simulate one case without a rule (none if empty); call it in a process of its own."""
    import jax

    from ultrascale_jax.plan.compiled.compile import compile_step, simulate_step

    jax.config.update("jax_enable_compilation_cache", False)
    cfg, cluster = run_of(name)
    if without == PLAIN:
        cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, lowering="plain"))
    elif without:
        rules.RULES = tuple(rule for rule in rules.RULES if rule.name != without)
        rules.choose.cache_clear()
    try:
        step = compile_step(cfg, cluster.num_gpus, "h100")
        timeline = simulate_step(step, cluster)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        return {"case": name, "without": without, "step_s": "0.0", "peak_gib": "0.0", "error": text}
    peak_gib = (step.peak_bytes + step.workspace_bytes) / 2**30
    row = {"case": name, "without": without, "step_s": timeline.step_s, "peak_gib": peak_gib}
    return {column: str(value) for column, value in row.items()} | {"error": ""}


def table(rows: Sequence[Row]) -> str:
    """Return a table of the runs to which each rule brings most and least, `without -> with`."""
    whole = {row["case"]: float(row["step_s"]) for row in rows if not row["without"]}
    lines = ["| rule | runs | most | least |", "|---|---|---|---|"]
    for name in [PLAIN, *(rule.name for rule in rules.RULES)]:
        gains = sorted(
            (1 - whole[row["case"]] / float(row["step_s"]), row["case"], float(row["step_s"]))
            for row in rows
            if row["without"] == name and not row["error"]
        )
        if gains:
            cells = [
                f"{case} {1e3 * step_s:,.0f} -> {1e3 * whole[case]:,.0f} ms, {gain:+.1%}"
                for gain, case, step_s in (gains[-1], gains[0])
            ]
            lines.append(f"| {name} | {len(gains)} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--anew", action="store_true", help="measure rows of the table again")
    options = parser.parse_args(argv)
    os.environ |= {"JAX_PLATFORMS": "cpu"}
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    set_environment(os.environ)
    rows = {(row["case"], row["without"]): row for row in read(TABLE)}
    jobs = [
        (name, without)
        for name in options.runs
        for without in ["", *applied(run_of(name)[0]), PLAIN]
        if options.anew or (name, without) not in rows
    ]
    start, context = time.perf_counter(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for row in pool.map(measure, *zip(*jobs, strict=True)) if jobs else ():
            rows[row["case"], row["without"]] = row
            print(f"{time.perf_counter() - start:6.0f} s  {row}", file=sys.stderr, flush=True)
            write(TABLE, list(rows.values()))
    print(table(list(rows.values())))


if __name__ == "__main__":
    main()
