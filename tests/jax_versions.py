"""Compile ten runs for H100s with the JAX of each interpreter: `python -m tests.jax_versions PYTHON ...`.

Writes docs/benchmarks/jax_versions.csv: CPU seconds and the most GiB of the process that compiles, the peak GiB of a
GPU, and the simulated step. A row that is there is not made again; delete the file to begin anew.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

from scripts.lowering_rules import CASES
from scripts.validation.xla_tables import read, write
from ultrascale_jax.units import GIB

TABLE = Path("docs/benchmarks/jax_versions.csv")
RUNS = "1b 8b 8b_fp8 8b_sp 128k 70b 70b_pp 405b mixtral mixtral_pp".split()
VERSION = "from importlib.metadata import version; print(version('jax'))"


def compiled(python: str, words: list[str]) -> dict[str, str]:
    """Compile a run in a process of its own, and return the figures of a row."""
    command = [python, "-m", "scripts.plan", "compile", *words, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    plan = json.loads(process.stdout.read())
    _, _, usage = os.wait4(process.pid, 0)
    return {
        "compile_cpu_s": f"{usage.ru_utime + usage.ru_stime:.0f}",
        "compile_gib": f"{usage.ru_maxrss / 2**20:.1f}",
        "peak_gib": f"{plan['needed_bytes'] / GIB:.2f}",
        "step_s": f"{plan['step_s']:.3f}",
    }


def main(pythons: list[str]) -> None:
    rows = read(TABLE) if TABLE.exists() else []
    made = {(row["jax"], row["run"]) for row in rows}
    for python, run in itertools.product(pythons, RUNS):
        jax = subprocess.check_output([python, "-c", VERSION], text=True).strip()
        if (jax, run) not in made:
            rows.append({"jax": jax, "run": run} | compiled(python, CASES[run].split()))
            write(TABLE, rows)
            print(*rows[-1].values(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
