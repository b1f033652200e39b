"""This trainer beside MaxText, both compiled by one XLA: `python -m scripts.validation.maxtext [RUN...] --out FILE`.

Installs MaxText into an environment of its own, which sees the JAX, XLA and Flax of this one; compiles the training
step of both for H100s that are not there; replays both schedules in the planner's simulator; and prints a table. Needs
the extra `aot` and a package index, and minutes for each program. A program of `RUNS` that FILE has is not compiled
again, but for those of the trainer that `--again` names. Without RUN, all.

Both have the same model, tokens and GPUs, bfloat16 or fp8 products, float32 weights and AdamW, cuDNN's attention and no
document mask. MaxText has no search: its options here are the fastest of those tried, and the slower ones stay in FILE.
"""

import argparse
import csv
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts.validation.xla_tables import markdown
from ultrascale_jax.cli import output
from ultrascale_jax.figures.charts import Bar, Bars
from ultrascale_jax.launch.distributed import GPU_FLAGS
from ultrascale_jax.plan.hardware import find_gpu
from ultrascale_jax.plan.workload import GIB
from ultrascale_jax.train_step.step import PREFETCH_OPTIONS

ROOT = Path(__file__).parents[2]

OURS, MAXTEXT = "ultrascale_jax", "MaxText"
TRAINERS = (MAXTEXT, OURS)

VERSION = "0.2.5"
"""Of MaxText."""

REQUIREMENTS = (
    *("absl-py", "aqtp", "drjax", "jaxtyping", "ml-collections", "omegaconf", "pathwaysutils"),
    *("qwix", "sentencepiece", "tensorflow", "tiktoken", "tokamax"),
)
"""What MaxText's training step imports beside `SHARED`; its own extras bring some 300 packages and another JAX."""

SHARED = ("flax", "jax", "jaxlib")
"""Packages that both trainers must have in one version."""

ON = "COLLECTIVE_PIPELINING_MODE_ON"
FLAGS: dict[str, dict[str, Any]] = {
    "run": {"xla_disable_hlo_passes": PREFETCH_OPTIONS["xla_disable_hlo_passes"]},
    "script": {
        "xla_disable_hlo_passes": "rematerialization",
        "xla_gpu_enable_while_loop_double_buffering": True,
        **{
            f"xla_gpu_pipeline_{kind}": ON
            for kind in ("all_gather", "all_reduce", "reduce_scatter")
        },
        "xla_gpu_all_reduce_combine_threshold_bytes": 2**30,
        "xla_gpu_all_gather_combine_threshold_bytes": 2**27,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**27,
        "xla_gpu_enable_all_gather_combine_by_dim": False,
        "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
    },
}
"""XLA flags for MaxText beside `GPU_FLAGS`, by name: `script` are those of its `configs/gpu/a3/llama_3.1_405b/128vm.sh`
that change the program. cuBLAS's products are left out on both sides, as nothing tunes them without a GPU."""

FP8_FLAGS = {"xla_gpu_enable_triton_gemm": False}
"""As this trainer sets it for fp8: Triton's products would be bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training step of one trainer on some GPUs, with what one of them takes."""

    run: str
    trainer: str
    gpus: int
    options: str
    """Of the trainer's command line."""
    flags: str = ""
    """The name of MaxText's XLA flags."""
    step_tokens: int = 0
    gib: float = 0.0
    """XLA's peak and cuDNN's workspace."""
    step_ms: float = 0.0
    """Simulated; 0 where there is no program."""
    reason: str = ""
    """Why there is no program."""

    @property
    def key(self) -> tuple[str, ...]:
        """Identify the program."""
        return self.run, self.trainer, str(self.gpus), self.options, self.flags

    @property
    def tokens_per_s_gpu(self) -> float:
        """Tokens that one GPU trains on in a second."""
        return 1e3 * self.step_tokens / self.step_ms / self.gpus

    @property
    def fits(self) -> bool:
        """Whether it was compiled and fits an H100."""
        return self.step_ms > 0 and self.gib * GIB <= find_gpu("h100").usable_bytes


LLAMA_8B = "model_name=llama3.1-8b max_target_length=8192 per_device_batch_size=2"

RUNS: dict[str, tuple[int, str, Sequence[tuple[str, str]]]] = {
    "8B bf16": (
        8,
        "llama3_8b --train.global-batch 16 --data.no-document-mask",
        (
            ("run", f"{LLAMA_8B} remat_policy=full"),
            ("run", f"{LLAMA_8B} remat_policy=minimal_with_context"),
            ("script", f"{LLAMA_8B} remat_policy=minimal_with_context"),
            ("run", f"{LLAMA_8B} remat_policy=minimal_with_context scan_layers=false"),
        ),
    ),
}
"""By name: GPUs; the options of `plan compile` for this trainer; names of flags and options for MaxText."""


def programs(runs: Iterable[str]) -> Iterator[Program]:
    """Yield the programs of these runs of `RUNS`, MaxText's first."""
    for name in runs:
        gpus, ours, theirs = RUNS[name]
        for flags, options in theirs:
            yield Program(run=name, trainer=MAXTEXT, gpus=gpus, options=options, flags=flags)
        yield Program(run=name, trainer=OURS, gpus=gpus, options=ours)


def make_environment(folder: Path) -> Path:
    """Return the Python of a virtual environment in `folder` with MaxText and this one's packages, made if need be."""
    python, done = folder / "bin" / "python", folder / f".maxtext-{VERSION}"
    if done.exists():
        return python
    print(f"installing MaxText {VERSION} into {folder}", file=sys.stderr)
    venv.create(folder, clear=True, with_pip=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    own = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "project.pth").write_text("\n".join(own))
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", f"maxtext=={VERSION}"], check=True)
    shared = [f"{name}=={metadata.version(name)}" for name in SHARED]
    subprocess.run([*pip, *REQUIREMENTS, *shared], check=True)
    done.touch()
    return python


def command_of(program: Program, folder: Path) -> list[str]:
    """Return the command that compiles a program and prints JSON; `folder` is MaxText's environment."""
    options = shlex.split(program.options)
    if program.trainer == OURS:
        recipe, *rest = options
        gpus = ["--gpus", str(program.gpus), "--json"]
        return [sys.executable, "-m", "scripts.plan", "compile", recipe, *gpus, *rest]
    flags = {**GPU_FLAGS, **FLAGS[program.flags]}
    if any(option.startswith("quantization=") for option in options):
        flags |= FP8_FLAGS
    python, module = str(make_environment(folder)), "scripts.validation.maxtext_program"
    head = [python, "-m", module, "--gpus", str(program.gpus), "--flags", json.dumps(flags)]
    return [*head, *options]


def measure(program: Program, folder: Path) -> Program:
    """Compile a program in a process of its own and return it with its figures, or with the reason why it has none."""
    environ = {
        "JAX_PLATFORMS": "cpu",  # no driver is asked for, and the plugin still compiles
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "DECOUPLE_GCLOUD": "TRUE",  # MaxText then needs none of Google Cloud's packages
    }
    ran = subprocess.run(
        command_of(program, folder),
        cwd=ROOT,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        lines = ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"]
        return dataclasses.replace(program, reason=lines[-1])
    found = json.loads(ran.stdout.splitlines()[-1])
    seconds = found["step_s"]
    tokens = found.get("step_tokens") or found["tokens_per_s_gpu"] * seconds * program.gpus
    return dataclasses.replace(
        program,
        step_tokens=round(tokens),
        gib=round((found["peak_bytes"] + found["workspace_bytes"]) / GIB, 2),
        step_ms=round(1e3 * seconds, 1),
    )


def read(path: Path) -> list[Program]:
    """Read the programs of a file, if there is one."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            Program(
                run=row["run"],
                trainer=row["trainer"],
                gpus=int(row["gpus"]),
                options=row["options"],
                flags=row["flags"],
                step_tokens=int(row["step_tokens"]),
                gib=float(row["gib"]),
                step_ms=float(row["step_ms"]),
                reason=row["reason"],
            )
            for row in csv.DictReader(file)
        ]


def write(path: Path, rows: Iterable[Program]) -> None:
    """Write programs to a file, in the order of `RUNS`."""
    order = {program.key: rank for rank, program in enumerate(programs(RUNS))}
    kept = sorted((row for row in rows if row.key in order), key=lambda row: order[row.key])
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        names = [field.name for field in dataclasses.fields(Program)]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(dataclasses.asdict, kept))
    partial.replace(path)


def best(rows: Iterable[Program], run: str, trainer: str) -> Program | None:
    """Return the fastest program of a run that fits, or one that says why there is none; None if none was compiled."""
    found = [row for row in rows if (row.run, row.trainer) == (run, trainer)]
    return min(found, key=lambda row: (not row.fits, bool(row.reason), row.step_ms), default=None)


def table(rows: Sequence[Program]) -> str:
    """Format the fastest of both trainers for each run, as Markdown."""
    lines = []
    for run, (gpus, _, _) in RUNS.items():
        pair = [best(rows, run, trainer) for trainer in TRAINERS]
        theirs, ours = pair
        if theirs is None or ours is None:
            continue
        ratio = f"{theirs.step_ms / ours.step_ms:.2f}" if theirs.fits and ours.fits else ""
        lines.append((run, gpus, *(cell for one in (theirs, ours) for cell in figures(one)), ratio))
    columns = ("GiB", "step ms", "tokens/s/GPU")
    head = [f"{trainer}: {name}" for trainer in TRAINERS for name in columns]
    return markdown(("run", "GPUs", *head, "speedup"), lines)


def options(rows: Sequence[Program]) -> str:
    """Format the options of the programs of `table`, as Markdown."""
    lines = []
    for run in RUNS:
        for row in filter(None, (best(rows, run, trainer) for trainer in TRAINERS)):
            lines.append((run, row.trainer, f"`{row.options}`", row.flags))
    return markdown(("run", "trainer", "options", "XLA flags"), lines)


def figures(program: Program) -> tuple[str, str, str]:
    """Format GiB, milliseconds and tokens/s a GPU; where there is no program, why."""
    if not program.step_ms:
        return program.reason, "", ""
    step = f"{program.step_ms:,.0f}" + ("" if program.fits else ", does not fit")
    return f"{program.gib:.1f}", step, f"{program.tokens_per_s_gpu:,.0f}"


def figure(rows: Sequence[Program]) -> Bars:
    """Draw our throughput over MaxText's for each run that both can do."""
    bars = []
    for run, (gpus, _, _) in RUNS.items():
        theirs, ours = (best(rows, run, trainer) for trainer in TRAINERS)
        if theirs and ours and theirs.fits and ours.fits:
            parts = {f"{OURS} over {MAXTEXT}": theirs.step_ms / ours.step_ms}
            note = f"{theirs.step_ms:,.0f} ms and {ours.step_ms:,.0f} ms"
            bars.append(Bar(label=f"{run}\n{gpus} GPUs", parts=parts, note=note))
    return Bars(
        name="maxtext",
        title=f"Throughput of {OURS} over that of {MAXTEXT} {VERSION}, simulated",
        caption="From docs/benchmarks/maxtext.csv: the same model, tokens, GPUs, XLA and simulator.",
        panels={"": bars},
        unit=f"tokens/s/GPU over those of {MAXTEXT}",
        x="",
        limit=1.0,
        limit_name=f"{MAXTEXT} {VERSION}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the CSV")
    parser.add_argument(
        "--again", action="append", choices=TRAINERS, default=[], help="compile its programs again"
    )
    parser.add_argument("--environment", type=Path, default=ROOT / "out" / "maxtext", metavar="DIR")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the speedups, a PNG")
    arguments = parser.parse_args()
    if unknown := set(arguments.runs) - set(RUNS):
        parser.error(f"no run is called {', '.join(unknown)}")
    rows = {row.key: row for row in read(arguments.out)}
    for program in programs(arguments.runs or RUNS):
        if program.key in rows and program.trainer not in arguments.again:
            continue
        print(f"{program.run}, {program.trainer}: {program.options}", file=sys.stderr)
        rows[program.key] = measure(program, arguments.environment)
        write(arguments.out, rows.values())
    print(table(list(rows.values())), options(list(rows.values())), sep="\n\n")
    if arguments.figure:
        print(output.write_figure(figure(list(rows.values())), arguments.figure))


if __name__ == "__main__":
    main()
