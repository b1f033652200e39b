"""Time the trainer and its kernels: `python -m scripts.bench SUITE [--out FILE.json] [--steps N] [--tiny]`.

    peer     the recipe gpt_peer on one core of this machine's CPU, against the same model in bare JAX. They take
             turns, two steps each, so all see the same disturbances; tokens per second of CPU time is the figure to
             compare, since it says little about what else the machine is doing.
    kernels  each part of a run that has a kernel, forward and backward, on shapes of Llama 3 and of experts, against
             XLA's own version or cuDNN, and against the rates at which this GPU copies and multiplies.

Every part is a process of its own, so that no part shares a device or a cache with another.
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from scripts.bench import kernels, trainers
from scripts.bench.report import Report, Row
from ultrascale_jax.cli import command_line
from ultrascale_jax.config import UserError
from ultrascale_jax.launch.distributed import set_environment

# The compile time is that of a cold cache.
ENVIRON = {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_NUM_CPU_DEVICES": "1"}


def in_process(
    environ: dict[str, str], measure: Callable[..., list[Row]], *arguments: Any
) -> list[Row]:
    """Return the rows of a function that runs in a process of its own with these environment variables."""
    kept = dict(os.environ)
    os.environ |= ENVIRON | environ
    set_environment(os.environ)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(measure, *arguments).result()
    finally:
        os.environ.clear()
        os.environ |= kept


def bench_peer(report: Report, steps: int, tiny: bool) -> None:
    """Time the trainers on the last core."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    report.add(*in_process({"JAX_PLATFORMS": "cpu"}, trainers.measure, steps, tiny))


def bench_kernels(report: Report, steps: int, tiny: bool) -> None:
    """Time the kernels; a part that fails, as without enough memory, has a row with the reason."""
    gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_triton_gemm=false"
    roofline: dict[str, Any] = {}
    for part in kernels.parts(tiny):
        print(f"{part.workload}: {part.kernel}", file=sys.stderr)
        float8 = {"XLA_FLAGS": flags.strip()} if part.float8 else {}
        try:
            rows = in_process(gpu | float8, kernels.measure, part, steps, tiny, roofline)
        except UserError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:500]
            rows = [{"workload": part.workload, "contestant": part.kernel, "reason": reason}]
        if part.kernel == "roofline":
            roofline |= {row["limit"]: row["rate"] for row in rows if "limit" in row}
        report.add(*rows)


SUITES = {"peer": bench_peer, "kernels": bench_kernels}


def main(argv: Sequence[str]) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m scripts.bench", description=__doc__, formatter_class=form
    )
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="default: out/bench/SUITE.json"
    )
    parser.add_argument("--steps", type=int, default=12, help="steps to time, 2 or more")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on any device")
    options = parser.parse_args(argv)
    path = options.out or Path(f"out/bench/{options.suite}.json")
    report = Report(path, ["scripts.bench", *argv])
    with command_line.user_errors():
        SUITES[options.suite](report, options.steps, options.tiny)
    report.print()
    return 1 if any("reason" in row for row in report.rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
