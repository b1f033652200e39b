"""Time the trainer and its kernels: `python -m scripts.bench [peer|gpu|kernels] [--out FILE.json] [--steps N]`.

    peer     the recipe gpt_peer on one core of this machine's CPU, against the same model in bare JAX. They take turns,
             two steps each, so all see the same disturbances; tokens per second of CPU time is the figure to compare,
             since it says little about what else the machine is doing.
    gpu      the recipe llama32_1b at sequence 4096 and 8192 in bfloat16 on one GPU, with each way of recomputing.
    kernels  each part of a run that has a kernel, forward and backward, on shapes of Llama 3 and of experts, against
             XLA's own version or cuDNN, and against the rates at which this GPU copies and multiplies in the same run.

Every part is a process of its own. A part that cannot run here is reported as skipped, with its reason.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from scripts.bench import child
from scripts.bench.report import Report
from ultrascale_jax.cli import command_line, output
from ultrascale_jax.config import require
from ultrascale_jax.config.section import Count, Section

TINY_MODEL = (
    "--model.vocab-size 256 --model.d-model 64 --model.d-ff 128 --model.num-layers 2 "
    "--model.num-heads 4 --model.num-kv-heads 4 --model.head-dim 16"
).split()

GPU_TOKENS = 16384
"""Tokens of one step in the suite gpu: they fit with the state of a billion parameters in 80 GB."""

REMAT = ("none", "dots", "full")
"""Ways of recomputing that the suite gpu tries, by the memory that they need."""

GROUPED_GEMMS = {
    "Qwen3-30B-A3B, 16 of 128 experts": (65536, 16, 2048, 768),
    "Mixtral 8x7B, 1 of 8 experts": (16384, 1, 4096, 14336),
    "Mixtral 8x7B, 2 of 8 experts": (16384, 2, 4096, 14336),
    "Mixtral 8x7B, 8 experts": (16384, 8, 4096, 14336),
}
"""Rows, experts and their two widths: a GPU's share of 8,192 tokens a GPU, each sent to 8 or 2 experts."""

KERNEL_SHAPES = {
    "norm": {
        "llama3_1b": (8192, 2048),
        "llama3_8b": (8192, 4096),
        "llama3_70b": (8192, 8192),
        "tiny": (11, 4096),
    },
    "fp8_product": {
        "llama3_1b": (8192, 8192, 2048),
        "llama3_8b": (8192, 14336, 4096),
        "llama3_70b": (8192, 28672, 8192),
        "tiny": (256, 128, 384),
    },
    "loss": {
        "llama3_1b": (8192, 2048, 128256),
        "llama3_8b": (8192, 4096, 128256),
        "llama3_70b": (8192, 8192, 128256),
        "tiny": (128, 256, 384),
    },
    "attention": {
        "llama3_1b": (1, 8192, 32, 8, 64),
        "llama3_8b": (1, 8192, 32, 8, 128),
        "llama3_70b": (1, 8192, 64, 8, 128),
        "tiny": (1, 384, 2, 1, 128),
    },
}
"""Sizes of each check of `cli/kernel_numerics.py` at 8,192 tokens a GPU; attention's begin with the batch."""

KERNEL_MODELS = ("llama3_8b", "llama3_70b", "llama3_1b")
"""Models whose shapes are timed, the most important first."""

CALLS = 8
"""Calls of a kernel's program in a row, so that they take longer than their dispatch."""

ROOFLINE, ROOFLINE_SIZE = "roofline", 8192

# The compile time is that of a cold cache.
ENVIRON = {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_NUM_CPU_DEVICES": "1"}


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Options of the benchmark."""

    suite: Literal["peer", "gpu", "kernels"] = "peer"
    """`peer`: a small model on one CPU core; `gpu`: Llama 3.2 1B on one GPU; `kernels`: our kernels on one GPU."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """JSON file for the figures; none is out/bench/SUITE.json."""
    steps: Count = 12
    """Steps to time of each contestant, after the first."""
    minutes: float = 15.0
    """Time for everything; a part that has not ended by then is stopped or skipped."""
    tiny: command_line.Flag = False
    """A model of no size, on any device: to try the benchmark itself."""

    def __post_init__(self):
        super().__post_init__()
        require(self.minutes > 0, "minutes", self.minutes, "must be positive")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A process of the benchmark."""

    module: Literal["trainers", "kernels"]
    workload: str
    name: str
    """Name in the report where it has no rows."""
    spec: dict[str, Any]
    environ: dict[str, str] = field(default_factory=dict)


def peer_parts(tiny: bool) -> Iterator[Part]:
    """Yield the part of the suite `peer`."""
    small = [*TINY_MODEL, "--data.seq-len", "64"] if tiny else []
    spec = {"arguments": ["gpt_peer", "--mesh", "fsdp=1", *small], "peers": True}
    environ = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    yield Part(
        module="trainers",
        workload="tiny" if tiny else "gpt_peer, one CPU core",
        name="all trainers",
        spec=spec | {"needs_gpu": False},
        environ=environ,
    )


def gpu_parts(tiny: bool) -> Iterator[Part]:
    """Yield the parts that train Llama 3.2 1B on one GPU."""
    for seq_len in (64, 128) if tiny else (4096, 8192):
        for remat in REMAT:
            batch = (128 if tiny else GPU_TOKENS) // seq_len
            arguments = (
                f"llama32_1b --mesh fsdp=1 --data.source synthetic --data.tokenizer bytes "
                f"--data.seq-len {seq_len} --data.no-document-mask --train.remat {remat} "
                f"--train.global-batch {batch} --train.microbatches 1"
            ).split()
            arguments += [*TINY_MODEL, "--model.num-kv-heads", "2"] if tiny else []
            yield Part(
                module="trainers",
                workload=f"{'tiny' if tiny else 'llama32_1b'}, sequence {seq_len}",
                name=f"ultrascale_jax, remat {remat}",
                spec={"arguments": arguments, "peers": False, "needs_gpu": not tiny},
                environ=_one_gpu(),
            )


def kernel_parts(tiny: bool) -> Iterator[Part]:
    """Yield the roofline, and the kernels by model; the products of experts come after the first model."""
    yield kernel_part(ROOFLINE, "this GPU", (64 if tiny else ROOFLINE_SIZE,), tiny)
    for model in ("tiny",) if tiny else KERNEL_MODELS:
        for kernel, by_model in KERNEL_SHAPES.items():
            yield kernel_part(kernel, model, by_model[model], tiny)
        if model == KERNEL_MODELS[0] or tiny:
            for name, shape in list(GROUPED_GEMMS.items())[: 1 if tiny else None]:
                yield kernel_part("experts", name, (512, 4, 64, 32) if tiny else shape, tiny)


def kernel_part(kernel: str, workload: str, shape: tuple[int, ...], tiny: bool) -> Part:
    """Return the part whose programs compute one part of a run and take turns (`kernels.py`)."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_triton_gemm=false"
    float8 = {"XLA_FLAGS": flags.strip()} if kernel in (ROOFLINE, "fp8_product") else {}
    spec = {"kernel": kernel, "shape": shape, "calls": 1 if tiny else CALLS, "needs_gpu": not tiny}
    environ = _one_gpu() | float8
    return Part(module="kernels", workload=workload, name=kernel, spec=spec, environ=environ)


def _one_gpu() -> dict[str, str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[0]}


SUITES = {"peer": peer_parts, "gpu": gpu_parts, "kernels": kernel_parts}


def measure(parts: Iterator[Part], options: Options, report: Report) -> None:
    """Measure the parts, one after the other, and add their rows to the report."""
    console, deadline = Console(stderr=True), time.monotonic() + 60 * options.minutes
    roofline: dict[str, float] = {}
    for part in parts:
        console.print(f"{part.workload}: {part.name}", markup=False)
        common = {"workload": part.workload, "steps": options.steps, "roofline": roofline}
        pinned = child.one_core() if options.suite == "peer" else contextlib.nullcontext()
        running = report.add(part.workload, part.name, status="running")
        try:
            with pinned:
                rows = child.run(
                    f"scripts.bench.{part.module}",
                    part.spec | common,
                    ENVIRON | part.environ,
                    deadline - time.monotonic(),
                )
        except child.Unavailable as reason:
            running |= {"status": "skipped", "reason": str(reason)}
        except child.Failed as error:
            status = "out of memory" if error.out_of_memory else "failed"
            running |= {"status": status, "reason": str(error)}
        else:
            report.rows[-1:] = [{"status": "measured"} | row for row in rows]
            if part.name == ROOFLINE:
                roofline = {row["limit"]: row["rate"] for row in rows}
        report.save()


def main(argv: Sequence[str]) -> None:
    if argv and not argv[0].startswith("-"):
        argv = ["--suite", *argv]
    with command_line.user_errors():
        prog = "python -m scripts.bench"
        options = command_line.read(Options, argv, prog=prog, description=__doc__ or "")
        path = options.out or Path("out/bench") / f"{options.suite}.json"
        report = Report(path, options.suite, ["python", "-m", "scripts.bench", *argv])
        parts = SUITES[options.suite](options.tiny)
        report.complete_by(lambda: measure(parts, options, report), output.console(190))
    if any(row["status"] == "failed" for row in report.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
