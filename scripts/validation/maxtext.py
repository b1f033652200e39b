"""This trainer beside MaxText, both compiled by one XLA: `python -m scripts.validation.maxtext [RUN...] --out FILE`.

Installs MaxText into an environment of its own, which sees the JAX, XLA and Flax of this one; compiles the training
step of both for H100s that are not there; replays both schedules in the planner's simulator; and prints a table. Needs
the extra `aot` and a package index, and up to minutes for each program. Programs that FILE has are kept, so another
FILE compiles all of them. Without RUN, all of `RUNS`.

Both have the same model, tokens and GPUs, bfloat16 or fp8 products, float32 weights and AdamW, cuDNN's attention and no
document mask. MaxText has no search: its options here are the fastest of those tried, and the slower ones stay in FILE.
"""

import argparse
import dataclasses
import json
import os
import re
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

from scripts.validation import xla_tables
from ultrascale_jax.cli import output
from ultrascale_jax.figures.charts import Bar, Bars
from ultrascale_jax.launch.distributed import GPU_FLAGS
from ultrascale_jax.plan.hardware import find_gpu
from ultrascale_jax.train_step.step import KEEP_RESULTS
from ultrascale_jax.units import GIB

ROOT = Path(__file__).parents[2]

OURS, MAXTEXT = "ultrascale_jax", "MaxText"
TRAINERS = (MAXTEXT, OURS)

VERSION = "0.2.5"
"""Of MaxText."""

REQUIREMENTS = (
    *("absl-py", "aqtp", "drjax", "jaxtyping", "ml-collections", "omegaconf", "pathwaysutils"),
    *("qwix", "sentencepiece", "tensorflow", "tiktoken", "tokamax"),
)
"""Packages that MaxText's training step imports beside `SHARED`; its own extras bring some 300, and another JAX."""

SHARED = ("flax", "jax", "jaxlib")
"""Packages that both trainers must have in one version."""

PIPELINED = ("all_gather", "all_reduce", "reduce_scatter")
FLAGS: dict[str, dict[str, Any]] = {
    "run": KEEP_RESULTS,
    "script": {
        "xla_gpu_enable_while_loop_double_buffering": True,
        **{f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in PIPELINED},
        "xla_gpu_all_reduce_combine_threshold_bytes": 2**30,
        "xla_gpu_all_gather_combine_threshold_bytes": 2**27,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**27,
        "xla_gpu_enable_all_gather_combine_by_dim": False,
        "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
    },
    "cublas": {"xla_gpu_enable_triton_gemm": False},
}
"""XLA flags for MaxText beside `GPU_FLAGS`, by name. `script` are those of its configs/gpu/a3/llama_3.1_405b/128vm.sh
that change the program, but for `cublas`, which this trainer sets for fp8 alone: nothing tunes cuBLAS without a GPU."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training step of one trainer on some GPUs, with what one of them takes."""

    run: str
    trainer: str
    gpus: int
    options: str
    """Of the trainer's command line."""
    flags: str = ""
    """Names of MaxText's XLA flags in `FLAGS`."""
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
LLAMA_70B = "model_name=llama3.1-70b max_target_length=8192 ici_data_parallelism=4"
LLAMA_405B = "model_name=llama3.1-405b max_target_length=8192 gradient_accumulation_steps=2"
LLAMA_1B = (
    "decoder_block=llama2 base_emb_dim=2048 base_num_query_heads=32 base_num_kv_heads=8 head_dim=64 base_mlp_dim=8192 "
    "base_num_decoder_layers=16 vocab_size=128256 logits_via_embedding=true enable_dropout=false "
    "max_target_length=4096 per_device_batch_size=4"
)
MIXTRAL = (
    "model_name=mixtral-8x7b max_target_length=4096 per_device_batch_size=16 remat_policy=full "
    "megablox=false"
)
DEEPSEEK = (
    "model_name=deepseek3-671b max_target_length=4096 megablox=false sparse_matmul=false "
    "per_device_batch_size=0.5 gradient_accumulation_steps=15 ici_data_parallelism=2 ici_fsdp_parallelism=8 "
    "ici_tensor_parallelism=2 ici_expert_parallelism=64"
)
LONG_8B = "model_name=llama3.1-8b ici_fsdp_parallelism=1"
OURS_8B = "llama3_8b --train.global-batch 16 --data.no-document-mask"
OURS_70B = "llama3_70b --data.no-document-mask"

RUNS: dict[str, tuple[int, str, Sequence[tuple[str, str]]]] = {
    "8B bf16": (
        8,
        OURS_8B,
        (
            ("run", f"{LLAMA_8B} remat_policy=full"),
            ("run", f"{LLAMA_8B} remat_policy=minimal_with_context"),
            ("run,script", f"{LLAMA_8B} remat_policy=minimal_with_context"),
            ("run", f"{LLAMA_8B} remat_policy=minimal_with_context scan_layers=false"),
        ),
    ),
    "8B fp8": (
        8,
        f"{OURS_8B} --train.precision fp8",
        (
            ("run", f"{LLAMA_8B} quantization=fp8 remat_policy=minimal_with_context"),
            ("run,script", f"{LLAMA_8B} quantization=fp8 remat_policy=minimal_with_context"),
            (
                "run",
                f"{LLAMA_8B} quantization=fp8 remat_policy=minimal_with_context scan_layers=false",
            ),
        ),
    ),
    "70B bf16": (
        512,
        OURS_70B,
        (
            (
                "run",
                f"{LLAMA_70B} ici_fsdp_parallelism=64 ici_tensor_sequence_parallelism=2 per_device_batch_size=0.5 "
                "gradient_accumulation_steps=2 remat_policy=minimal_with_context",
            ),
            (
                "run,script",
                f"{LLAMA_70B} ici_fsdp_parallelism=128 per_device_batch_size=1 remat_policy=save_qkv_proj",
            ),
            (
                "run,script",
                f"{LLAMA_70B} ici_fsdp_parallelism=128 per_device_batch_size=1 "
                "remat_policy=save_dot_with_context_except_mlp",
            ),
        ),
    ),
    "70B fp8": (
        512,
        f"{OURS_70B} --train.precision fp8",
        (
            (
                "run,script,cublas",
                f"{LLAMA_70B} ici_fsdp_parallelism=128 per_device_batch_size=1 quantization=fp8 "
                "remat_policy=save_dot_with_context_except_mlp",
            ),
        ),
    ),
    "405B bf16": (
        1024,
        "llama3_405b --data.no-document-mask",
        (
            (
                "run,script",
                f"{LLAMA_405B} ici_fsdp_parallelism=1024 per_device_batch_size=1 remat_policy=full",
            ),
            (
                "run",
                f"{LLAMA_405B} ici_fsdp_parallelism=1024 per_device_batch_size=1 remat_policy=full",
            ),
            (
                "run",
                f"{LLAMA_405B} ici_fsdp_parallelism=512 ici_tensor_sequence_parallelism=2 per_device_batch_size=1 "
                "remat_policy=full",
            ),
        ),
    ),
    "1B bf16": (
        1,
        "llama32_1b --mesh fsdp=1 --data.seq-len 4096 --data.no-document-mask --train.global-batch 4 "
        "--train.remat selective --train.microbatches 1",
        (
            ("run", f"{LLAMA_1B} remat_policy=minimal_with_context"),
            ("run", f"{LLAMA_1B} remat_policy=minimal_with_context scan_layers=false"),
        ),
    ),
    "Mixtral": (
        64,
        "mixtral_8x7b --data.no-document-mask",
        (
            (
                "run",
                f"{MIXTRAL} sparse_matmul=true ici_fsdp_parallelism=8 ici_expert_parallelism=8",
            ),
            (
                "run",
                f"{MIXTRAL} sparse_matmul=false capacity_factor=1.25 ici_fsdp_parallelism=8 ici_expert_parallelism=8",
            ),
            (
                "run",
                f"{MIXTRAL} sparse_matmul=false capacity_factor=1.25 ici_fsdp_parallelism=64",
            ),
        ),
    ),
    "DeepSeek": (
        2048,
        "deepseek_v3",
        (("run", f"{DEEPSEEK} capacity_factor=1.25 remat_policy=full"),),
    ),
    "8B 131k": (
        8,
        "llama3_8b_128k",
        (
            (
                "run",
                f"{LONG_8B} max_target_length=131072 per_device_batch_size=0.125 gradient_accumulation_steps=32 "
                "ici_context_parallelism=8 remat_policy=save_qkv_proj",
            ),
            (
                "run",
                f"{LONG_8B} max_target_length=131072 per_device_batch_size=0.125 gradient_accumulation_steps=32 "
                "ici_tensor_sequence_parallelism=8 remat_policy=save_dot_with_context_except_mlp",
            ),
        ),
    ),
    "8B 1M": (
        64,
        "llama3_8b_1m",
        (
            (
                "run",
                f"{LONG_8B} max_target_length=1048576 per_device_batch_size=0.015625 gradient_accumulation_steps=4 "
                "ici_context_parallelism=64 remat_policy=save_qkv_proj",
            ),
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
    flags = GPU_FLAGS.copy()
    for name in program.flags.split(","):
        flags |= FLAGS[name]
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
        errors = re.findall(r"^[\w.]*(?:Error|Exception): .+", ran.stderr, re.MULTILINE)
        reason = errors[-1] if errors else f"exit code {ran.returncode}"
        return dataclasses.replace(program, reason=reason[:160])
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
        for row in xla_tables.read(path)
    ]


def write(path: Path, rows: Iterable[Program]) -> None:
    """Write programs to a file, in the order of `RUNS`."""
    order = {program.key: rank for rank, program in enumerate(programs(RUNS))}
    kept = sorted((row for row in rows if row.key in order), key=lambda row: order[row.key])
    names = [field.name for field in dataclasses.fields(Program)]
    xla_tables.write(path, names, map(dataclasses.asdict, kept))


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
    return xla_tables.markdown(("run", "GPUs", *head, "speedup"), lines)


def options(rows: Sequence[Program]) -> str:
    """Format the options of the programs of `table`, as Markdown."""
    lines = []
    for run in RUNS:
        for row in filter(None, (best(rows, run, trainer) for trainer in TRAINERS)):
            lines.append((run, row.trainer, f"`{row.options}`", row.flags))
    return xla_tables.markdown(("run", "trainer", "options", "XLA flags"), lines)


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
            bars.append(Bar(label="\n".join((*run.split(), f"{gpus:,}")), parts=parts, note=note))
    return Bars(
        name="maxtext",
        title=f"Throughput beside {MAXTEXT} {VERSION}, simulated",
        caption="From docs/benchmarks/maxtext.csv: the same model, tokens, GPUs, XLA and simulator.",
        panels={"": bars},
        unit=f"tokens/s/GPU over those of {MAXTEXT}",
        x="run, GPUs",
        limit=1.0,
        limit_name=f"{MAXTEXT} {VERSION}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the CSV")
    parser.add_argument("--trainer", choices=TRAINERS, help="compile its programs only")
    parser.add_argument("--again", action="store_true", help="also those that FILE has")
    parser.add_argument("--environment", type=Path, default=ROOT / "out" / "maxtext", metavar="DIR")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the speedups, a PNG")
    arguments = parser.parse_args()
    if unknown := set(arguments.runs) - set(RUNS):
        parser.error(f"no run is called {', '.join(unknown)}")
    rows = {row.key: row for row in read(arguments.out)}
    for program in programs(arguments.runs or RUNS):
        if arguments.trainer not in (None, program.trainer):
            continue
        if program.key in rows and not arguments.again:
            continue
        print(f"{program.run}, {program.trainer}: {program.options}", file=sys.stderr)
        rows[program.key] = measure(program, arguments.environment)
        write(arguments.out, rows.values())
    print(table(list(rows.values())), options(list(rows.values())), sep="\n\n")
    if arguments.figure:
        print(output.write_figure(figure(list(rows.values())), arguments.figure))


if __name__ == "__main__":
    main()
