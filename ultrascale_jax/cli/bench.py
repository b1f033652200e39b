"""Time the trainer beside its peers: `ultrascale bench [peer|gpu|kernels] [--out FILE.json] [--steps N]`.

    peer  the recipe gpt_peer on one core of this machine's CPU, beside the same model in bare JAX (and in PyTorch,
          where it is installed). They take turns step by step, so all see the same disturbances; tokens per second
          of CPU time is the figure to compare, since it says little about what else the machine is doing.
    gpu   the recipe llama32_1b at sequence 4096 and 8192 in bfloat16 on one GPU, beside PyTorch. One at a time, since
          each wants the whole memory. First one figure for each, with the least recomputation that fits; then
          attention alone, over a mesh axis of size 1 and in zigzag's blocks, beside cuDNN directly; the products of
          experts, beside `lax.ragged_dot`; then, in the time that is left, the other ways of recomputing.
    kernels  our kernels on the shapes of Llama 3, beside XLA's own version or cuDNN, and beside how fast this GPU
          copies and multiplies in the same run.

Every contestant is a process of its own. A part that cannot run here is reported as skipped, with its reason.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import re
import resource
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from ultrascale_jax.cli import command_line, output
from ultrascale_jax.cli.bench_peers.contestant import Program, Unavailable
from ultrascale_jax.cli.bench_peers.report import Report, figures, step_deciles
from ultrascale_jax.cli.bench_peers.runner import Failed, OutOfTime, Process, one_core
from ultrascale_jax.config import Config, require
from ultrascale_jax.configs.shapes import LLAMA3_8B
from ultrascale_jax.kernels import shapes
from ultrascale_jax.launch.run_files import METRICS

OURS, BARE, TORCH, TURNS = (
    f"ultrascale_jax.cli.bench_peers.{name}"
    for name in ("ours", "bare_jax", "torch_llama", "turns")
)

TINY_MODEL = {
    **{"vocab-size": 256, "d-model": 64, "d-ff": 128, "num-layers": 2},
    **{"num-heads": 4, "num-kv-heads": 4, "head-dim": 16},
}

GPU_TOKENS = 16384
"""Tokens of one step in the suite gpu: what fits beside the state of a billion parameters in 80 GB."""

REMAT = ("none", "dots", "full")
"""Ways of recomputing that the suite gpu tries, by the memory that they need."""

TORCH_SETTINGS = ({}, {"loss_chunks": 8}, {"loss_chunks": 8, "recompute": True})
"""Settings of PyTorch that the suite gpu tries, by the memory that they need."""

ATTENTION_TOKENS = (8192, 16384, 32768)
"""Sequence lengths at which attention is timed alone; steps make so many calls that each length takes equal time."""

GROUPED_GEMMS = {
    "Qwen3-30B-A3B, 16 of 128 experts": (65536, 16, 2048, 768),
    "Mixtral 8x7B, 1 of 8 experts": (16384, 1, 4096, 14336),
    "Mixtral 8x7B, 2 of 8 experts": (16384, 2, 4096, 14336),
    "Mixtral 8x7B, 8 experts": (16384, 8, 4096, 14336),
}
"""Rows, experts and their two widths: what a GPU has of 8,192 tokens a GPU, each sent to 8 or 2 experts."""

GROUPED_GEMM_CALLS = 8
"""Calls of a step: the kernel takes half a millisecond for the smallest."""

KERNEL_SHAPES = {
    "rms_norm": shapes.RMS_NORM,
    "quantize_fp8": shapes.QUANTIZE_FP8,
    "fp8_matmul": shapes.FP8_MATMUL,
    "linear_cross_entropy": shapes.LINEAR_CROSS_ENTROPY,
    "attention": shapes.ATTENTION,
}

KERNEL_MODELS = ("llama3_8b", "llama3_70b", "llama3_1b")
"""Models whose shapes are timed, the most important first."""

KERNEL_CALLS = 4

ROOFLINE_SIZE = 8192

GOALS = (
    (r"attention, sequence \d+: forward.*: (ring|zigzag)_attention", "relative", 1.02, False),
    (r"experts, .*: forward: grouped_matmul, mosaic", "tflops_per_device", 400, True),
    (r"experts, .*: weight gradient: grouped_matmul, mosaic", "tflops_per_device", 450, True),
    (r"rms_norm, backward: mosaic", "of_roofline", 0.85, True),
    (r"rms_norm, backward: mosaic", "relative", 1 / 1.5, False),
    (r"quantize.*: mosaic", "of_roofline", 0.8, True),
    (r"fp8_matmul, .*: mosaic", "tflops_per_device", 1000, True),
    (r"linear_cross_entropy, forward and backward: mosaic", "tflops_per_device", 620, True),
    (r"linear_cross_entropy, forward and backward: mosaic", "temporary_gb", 1.0, False),
    (r"attention, (causal|documents), .*: mosaic", "relative", 1.0, False),
)
"""Goals on an H100 of programs that take turns: a pattern in `workload: work: contestant`, the figure, what is wanted,
and whether that is the least or the most."""

FIRST_STEP = "scripts.train, to its first step"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `ultrascale bench`."""

    suite: Literal["peer", "gpu", "kernels"] = "peer"
    """`peer`: a small model on one CPU core; `gpu`: Llama 3.2 1B on one GPU; `kernels`: our kernels on one GPU."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """JSON file for the figures; none is out/bench/SUITE.json."""
    steps: int = 12
    """Steps to time of each contestant, after the first."""
    minutes: float = 8.0
    """Time for everything; what has not ended by then is stopped or skipped."""
    tiny: command_line.Flag = False
    """A model of no size, on any device: to try the benchmark itself."""

    def __post_init__(self):
        command_line.require_at_least(1, self, "steps")
        require(self.minutes > 0, "minutes", self.minutes, "must be positive")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One contestant with its settings; a row of the report."""

    workload: str
    contestant: str
    module: str
    cfg: Config
    spec: dict
    environ: dict[str, str]


class Bench:
    """One benchmark under way."""

    def __init__(self, options: Options, report: Report):
        self.options, self.report = options, report
        self.deadline = time.monotonic() + 60 * options.minutes
        self.console = Console(stderr=True)
        self.roofline: dict[str, float] = {}
        """Bytes or operations a second of each limit."""

    def peer(self) -> None:
        """Run the suite `peer`."""
        parts = peer_parts(self.options.tiny)
        with contextlib.ExitStack() as stack:
            running = []
            for part in parts:
                row = self._row(part)
                with self._recorded(row):
                    with one_core():
                        process = stack.enter_context(self._start(part))
                    facts = process.ready()
                    running.append((part, row, process, facts, [], []))
            for turn in itertools.batched(range(self.options.steps), 2):
                for part, row, process, facts, step_s, cpu_s in running:
                    if row["status"] not in ("running", "measured"):
                        continue
                    with self._recorded(row):
                        answer = process.run(len(turn))
                        step_s += answer["step_s"]
                        cpu_s += [answer["cpu_s"] / len(turn)]
                        row |= figures(part.cfg, facts, step_s, cpu_s, answer["peak_bytes"])
                        row["status"] = "measured"
        self._first_step(parts[0])
        if not self.options.tiny:
            self._peer_goals()

    def gpu(self) -> None:
        """Run the suite `gpu`."""
        seq_lens = (64, 128) if self.options.tiny else (4096, 8192)
        ours = {
            n: [gpu_part(n, remat, tiny=self.options.tiny) for remat in REMAT] for n in seq_lens
        }
        torch = {
            n: [gpu_torch_part(n, settings, tiny=self.options.tiny) for settings in TORCH_SETTINGS]
            for n in seq_lens
        }
        tried = [
            part
            for n in seq_lens
            for parts in (ours[n], torch[n])
            for part in self._first_that_fits(parts)
        ]
        for n in (64, 128) if self.options.tiny else ATTENTION_TOKENS:
            self._in_turns(attention_part(n, tiny=self.options.tiny))
        for name in list(GROUPED_GEMMS)[: 1 if self.options.tiny else None]:
            self._in_turns(grouped_gemm_part(name, tiny=self.options.tiny))
        for part in (part for n in seq_lens for part in ours[n] if part not in tried):
            self._measure(part)
        for n in () if self.options.tiny else seq_lens:
            self._gpu_goals(ours[n][0].workload)

    def kernels(self) -> None:
        """Run the suite `kernels`."""
        tiny = self.options.tiny
        self._in_turns(kernel_part("roofline", "this GPU", (64 if tiny else ROOFLINE_SIZE,), tiny))
        for model in ("tiny",) if tiny else KERNEL_MODELS:
            for kernel, by_model in KERNEL_SHAPES.items():
                self._in_turns(kernel_part(kernel, model, by_model[model], tiny))
            if model == KERNEL_MODELS[0] or tiny:
                for name in list(GROUPED_GEMMS)[: 1 if tiny else None]:
                    self._in_turns(grouped_gemm_part(name, tiny=tiny))

    def _first_that_fits(self, parts: Iterable[Part]) -> list[Part]:
        """Measure the first part that fits in memory; return the parts tried, of which the last failed if none fits."""
        tried, row = [], {}
        for part in parts:
            tried.append(part)
            row = self._measure(part)
            if row["status"] != "out of memory":
                return tried
        row["status"] = "failed"
        return tried

    def _measure(self, part: Part) -> dict:
        """Time one part alone."""
        row = self._row(part)
        with self._recorded(row), self._start(part) as process:
            facts = process.ready()
            process.run(2)
            answer = process.run(self.options.steps)
            row |= figures(part.cfg, facts, answer["step_s"], [], answer["peak_bytes"])
            row["status"] = "measured"
        return row

    def _in_turns(self, part: Part) -> None:
        """Time programs that take turns in one process: a row of the process, and one of each, with its goals."""
        row, first = self._row(part), {}
        with self._recorded(row), self._start(part) as process:
            facts = process.ready()
            programs = [Program(**fields) for fields in facts.pop("programs")]
            process.run(len(programs))
            answer = process.run(len(programs) * self.options.steps)
            row |= {"peak_gb": answer["peak_bytes"] / 1e9, **facts, "status": "measured"}
            for i, program in enumerate(programs):
                step_s = answer["step_s"][i :: len(programs)]
                # Of neighbours in time: the clock of a GPU moves by more than what is looked for.
                pairs = zip(step_s, first.setdefault(program.work, step_s), strict=True)
                one = self.report.add(
                    f"{part.workload}: {program.work}",
                    program.contestant,
                    **step_deciles([s / (part.spec["calls"] * program.copies) for s in step_s]),
                    relative=statistics.median(ours / theirs for ours, theirs in pairs),
                )
                self._add_rates(one, program, part)
                self._add_goals(one)

    def _add_rates(self, row: dict, program: Program, part: Part) -> None:
        """Add how fast a program was, also of the roofline, and its other figures, to its row."""
        if program.figures.get("fp8_products") == 0 and not self.options.tiny:
            row |= {"status": "failed", "reason": "XLA made no product in float8 of it"}
            return
        row |= program.figures
        rate = program.amount / row["step_s"]["median"]
        if program.limit == "copy":
            row["gb_per_s"] = rate / 1e9
        else:
            row["tflops_per_device"] = rate / 1e12
        if part.spec["kernel"] == "roofline":
            self.roofline[program.limit] = rate
        elif program.limit in self.roofline:
            row["of_roofline"] = rate / self.roofline[program.limit]

    def _add_goals(self, row: dict) -> None:
        """Compare a row of programs that take turns with `GOALS`."""
        place = f"{row['workload']}: {row['contestant']}"
        for pattern, figure, wanted, at_least in () if self.options.tiny else GOALS:
            if figure in row and re.search(pattern, place):
                met = row[figure] >= wanted if at_least else row[figure] <= wanted
                words = f"at {'least' if at_least else 'most'} {wanted:.3g}"
                self.report.goal(f"{place}: {figure}, {words}", row[figure], met)

    def _row(self, part: Part) -> dict:
        self.console.print(f"{part.workload}: {part.contestant}", markup=False)
        return self.report.add(part.workload, part.contestant, status="running")

    def _start(self, part: Part) -> Process:
        if part.module == TORCH and importlib.util.find_spec("torch") is None:
            raise Unavailable("torch is not installed")
        if time.monotonic() > self.deadline:
            raise Unavailable(f"the {self.options.minutes:g} minutes were over")
        spec = json.dumps(part.spec)
        return Process(part.module, spec, environ=part.environ, deadline=self.deadline)

    @contextlib.contextmanager
    def _recorded(self, row: dict):
        """Write the exception that ends the block early into `row`, and save the report in any case."""
        try:
            yield
        except (Unavailable, OutOfTime) as reason:
            row |= {"status": "skipped", "reason": str(reason)}
        except Failed as error:
            status = "out of memory" if error.out_of_memory else "failed"
            row |= {"status": status, "reason": str(error)}
        finally:
            self.report.save()

    def _first_step(self, part: Part) -> None:
        """Time `ultrascale train` from its start to the first row of its metrics."""
        row = self.report.add(part.workload, FIRST_STEP, status="running")
        with self._recorded(row), tempfile.TemporaryDirectory() as folder:
            metrics = Path(folder) / METRICS
            arguments = ["train", *part.spec["arguments"], "--train.steps", "1"]
            arguments += ["--run-dir", folder]
            earlier = resource.getrusage(resource.RUSAGE_CHILDREN)
            with one_core():
                process = Process(
                    "ultrascale_jax", *arguments, environ=part.environ, deadline=self.deadline
                )
            with process:
                seconds = process.wait_for(lambda: metrics.exists() and "\n" in metrics.read_text())
            row |= {"status": "measured", "first_step_s": seconds}
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            # User and system time are the first two fields.
            row["first_step_cpu_s"] = sum(used[:2]) - sum(earlier[:2])

    def _peer_goals(self) -> None:
        rows = {row["contestant"]: row for row in self.report.rows if row["status"] == "measured"}
        speeds = {name: row["tokens_per_cpu_s"] for name, row in rows.items() if name != FIRST_STEP}
        if ours := speeds.get("ultrascale_jax"):
            self.report.goal("tokens per CPU-second, at least 700", ours, ours >= 700)
            if bare := [speed for name, speed in speeds.items() if name.startswith("bare JAX")]:
                # On the machine where the goal of 700 was set, bare JAX reached 811.
                ratio, least = ours / max(bare), 700 / 811
                text = f"speed relative to the faster bare JAX, at least {least:.2f}"
                self.report.goal(text, ratio, ratio >= least)
        if FIRST_STEP in rows:
            seconds = rows[FIRST_STEP]["first_step_s"]
            self.report.goal("seconds from start to first step, at most 12", seconds, seconds <= 12)

    def _gpu_goals(self, workload: str) -> None:
        rows = [row for row in self.report.rows if row["workload"] == workload and "step_s" in row]
        ours, torch = (
            [row for row in rows if row["contestant"].startswith(name)]
            for name in ("ultrascale_jax", "PyTorch")
        )
        if ours and torch:
            theirs, own = (min(row["step_s"]["median"] for row in some) for some in (torch, ours))
            ratio = theirs / own
            self.report.goal(f"{workload}: speed relative to PyTorch, above 1", ratio, ratio > 1)
        if shares := [row["mfu"] for row in ours if "mfu" in row]:
            self.report.goal(f"{workload}: MFU, at least 50%", max(shares), max(shares) >= 0.5)


def peer_parts(tiny: bool) -> list[Part]:
    """Return the contestants of the suite `peer`, ours first."""
    arguments = ["gpt_peer", "--mesh", "fsdp=1"]
    if tiny:
        arguments += [*_tiny_model(), "--data.seq-len", "64"]
    cfg, _ = command_line.parse(arguments, prog="bench")
    ours = {"arguments": arguments, "needs_gpu": False}
    torch = {"recompute": False, "loss_chunks": 1, "compile": False, "needs_gpu": False}
    contestants = {
        "ultrascale_jax": (OURS, ours),
        "bare JAX, scanned": (BARE, {"unrolled": False, **_numbers(cfg)}),
        "bare JAX, unrolled": (BARE, {"unrolled": True, **_numbers(cfg)}),
        "PyTorch, eager": (TORCH, {**torch, **_numbers(cfg)}),
    }
    environ = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", **_ENVIRON}
    workload = "tiny" if tiny else "gpt_peer, one CPU core"
    return [
        Part(workload=workload, contestant=name, module=module, cfg=cfg, spec=spec, environ=environ)
        for name, (module, spec) in contestants.items()
    ]


def gpu_part(seq_len: int, remat: str, *, tiny: bool) -> Part:
    """Return the part that trains Llama 3.2 1B on one GPU in this project."""
    batch = (128 if tiny else GPU_TOKENS) // seq_len
    arguments = "llama32_1b --mesh fsdp=1 --data.source synthetic --data.tokenizer bytes".split()
    arguments += ["--data.seq-len", str(seq_len), "--data.no-document-mask", "--train.remat", remat]
    arguments += ["--train.global-batch", str(batch), "--train.microbatches", "1"]
    arguments += [*_tiny_model(), "--model.num-kv-heads", "2"] if tiny else []
    cfg, _ = command_line.parse(arguments, prog="bench")
    return Part(
        workload=f"{'tiny' if tiny else 'llama32_1b'}, sequence {seq_len}",
        contestant=f"ultrascale_jax, remat {remat}",
        module=OURS,
        cfg=cfg,
        spec={"arguments": arguments, "needs_gpu": not tiny},
        environ={**_one_gpu(), **_ENVIRON},
    )


def gpu_torch_part(seq_len: int, settings: dict, *, tiny: bool) -> Part:
    """Return the part that trains the same model in PyTorch."""
    ours = gpu_part(seq_len, "none", tiny=tiny)
    defaults = {"recompute": False, "loss_chunks": 1}
    spec = {**defaults, "compile": not tiny, "needs_gpu": not tiny, **settings}
    return dataclasses.replace(
        ours,
        contestant=", ".join(["PyTorch", *(f"{name} {value}" for name, value in settings.items())]),
        module=TORCH,
        spec={**spec, **_numbers(ours.cfg)},
        environ={**_one_gpu(), "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    )


def attention_part(seq_len: int, *, tiny: bool) -> Part:
    """Return the part that times attention with the heads of Llama 3 8B on one sequence."""
    heads = (
        (4, 2, 16) if tiny else (LLAMA3_8B.num_heads, LLAMA3_8B.num_kv_heads, LLAMA3_8B.head_dim)
    )
    calls = (max(ATTENTION_TOKENS) // seq_len) ** 2
    shape = (seq_len, *heads)
    return _turns_part(f"attention, sequence {seq_len}", "ring_attention", shape, calls, tiny=tiny)


def grouped_gemm_part(name: str, *, tiny: bool) -> Part:
    """Return the part that times the products of the experts of `GROUPED_GEMMS[name]`."""
    shape = (512, 4, 64, 32) if tiny else GROUPED_GEMMS[name]
    return _turns_part(f"experts, {name}", "grouped_matmul", shape, GROUPED_GEMM_CALLS, tiny=tiny)


def kernel_part(kernel: str, model: str, shape: tuple[int, ...], tiny: bool) -> Part:
    """Return the part that times a kernel on a shape."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_triton_gemm=false"
    float8 = {"XLA_FLAGS": flags.strip()} if kernel in ("roofline", "fp8_matmul") else {}
    part = _turns_part(model, kernel, shape, KERNEL_CALLS, tiny=tiny)
    name = f"{kernel}, {part.contestant}"
    return dataclasses.replace(part, workload=model, contestant=name, environ=part.environ | float8)


def _turns_part(
    workload: str, kernel: str, shape: tuple[int, ...], calls: int, *, tiny: bool
) -> Part:
    """Return the part of a kernel's programs (`bench_peers/works.py`), which take turns in one process."""
    return Part(
        workload=f"{'tiny ' if tiny else ''}{workload}",
        contestant="all of its programs",
        module=TURNS,
        cfg=Config(),
        spec={
            "kernel": kernel,
            "shape": shape,
            "calls": 1 if tiny else calls,
            "needs_gpu": not tiny,
        },
        environ={**_one_gpu(), **_ENVIRON},
    )


# What an earlier run has compiled would make the compile time a fiction.
_ENVIRON = {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_NUM_CPU_DEVICES": "1"}


def _one_gpu() -> dict[str, str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[0]}


def _tiny_model() -> list[str]:
    return [word for name, value in TINY_MODEL.items() for word in (f"--model.{name}", str(value))]


def _numbers(cfg: Config) -> dict:
    """Describe a run in plain numbers, for contestants that do not import this project."""
    return {
        "model": dataclasses.asdict(cfg.model),
        "optim": dataclasses.asdict(cfg.optim),
        "precision": cfg.train.precision,
        "batch": cfg.train.global_batch,
        "seq_len": cfg.data.seq_len,
    }


def main(argv: Sequence[str]) -> None:
    if argv and not argv[0].startswith("-"):
        argv = ["--suite", *argv]
    with command_line.user_errors():
        prog = "ultrascale bench"
        options = command_line.read(Options, argv, prog=prog, description=__doc__ or "")
        path = options.out or Path("out/bench") / f"{options.suite}.json"
        report = Report(path, options.suite, ["ultrascale", "bench", *argv])
        report.complete_by(getattr(Bench(options, report), options.suite), output.console(190))
    if any(row["status"] == "failed" for row in report.rows):
        raise SystemExit(1)
