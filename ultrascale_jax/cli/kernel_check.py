"""Check the kernels that a run takes, on the GPU that it is about to take; the check chooses nothing.

The table of `kernels/choices.py` and the fields of `kernels` choose. Process 0 starts a process on one of its GPUs,
which computes each part of the run that has a kernel, small, and compares it with the reference in float32
(`cli/kernel_numerics.py`). A part that is wrong, or crashes, refuses the run on all processes; a part that could not be
checked, because time was up or memory short, is reported. A GPU that a run has taken has no memory left for a check, so
the check comes first, on the shapes of the GPUs that the driver and the launcher report.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ultrascale_jax.cli import command_line, devices
from ultrascale_jax.config import Config, ModelConfig, UserError, padded_vocab_size, require
from ultrascale_jax.kernels.choices import auto_order
from ultrascale_jax.launch import distributed
from ultrascale_jax.launch.cluster import Launch, visible_gpus
from ultrascale_jax.launch.events import Events
from ultrascale_jax.launch.processes import SUPERVISOR, follow_supervisor
from ultrascale_jax.launch.procfs import gpu_kinds
from ultrascale_jax.plan.auto import cluster_of

LIMIT_S = 240.0
"""Seconds for all checks together; most of them are XLA's, which compiles and tries its own products on the GPU."""

TOKENS = 4096
"""Tokens of a check, of attention's at most: its reference holds the scores of all pairs."""


@dataclass(frozen=True)
class Part:
    """A part of a run that a kernel computes."""

    field: str
    """A field of `kernels`."""
    implementation: str
    """Its value."""
    check: str
    """A function of `cli/kernel_numerics.py`."""
    sizes: tuple[int, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of that function."""
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        options = [f"{name} {value}" for name, value in self.options.items() if value]
        return ", ".join([f"{self.check} {list(self.sizes)}", *options])


def _heads(shape: ModelConfig, ranks: int) -> tuple[int, int, int]:
    """Return query heads, key heads, at most two, and their width of a layer's attention, as one of `ranks` has it."""
    local_key_heads = max(1, shape.num_kv_heads // ranks)
    key_heads = min(local_key_heads, 2)
    heads = shape.num_heads // ranks // local_key_heads * key_heads
    return heads, key_heads, shape.head_dim


def parts(cfg: Config, kind: str) -> list[Part]:
    """Return the parts of a run on GPUs of `kind` that XLA may not compute; `cfg` is checked, and not open."""
    if cfg.train.precision == "fp32":
        return []
    mesh, model, tensor = cfg.mesh, cfg.model, cfg.mesh.tensor
    dtype = "float16" if cfg.train.precision == "fp16" else "bfloat16"
    checked = []

    def add(field: str, check: str, *sizes: int, **options: Any) -> None:
        value = getattr(cfg.kernels, field)
        order = auto_order(field, kind) if value == "auto" else (value,)
        if order != ("xla",):
            checked.append(Part(field, value, check, sizes, options, dtype))

    ring, ulysses = cfg.cp.ranks(mesh.cp)
    row, documents = cfg.data.seq_len // ring, cfg.data.document_mask
    while row > TOKENS and row % 2 == 0:  # halved, a row of documents keeps its classes
        row //= 2
    sinks = model.attention_sinks
    sizes = row, *_heads(model.full_shape, tensor * ulysses)
    if ring > 1:
        add("attention", "ring_block", *sizes, documents=documents)
    else:
        add("attention", "plain", *sizes, documents=documents, sinks=sinks)
    if model.sliding_window is not None:
        window, documents = min(model.sliding_window, row // 2), documents and ring == 1
        sizes = row, *_heads(model, tensor * ulysses)
        add("attention", "plain", *sizes, window=window, documents=documents, sinks=sinks)
    width, d_ff = model.d_model, model.d_ff // tensor
    add("norm", "norm", TOKENS, width)
    parts = tensor * mesh.pp
    add("loss", "loss", TOKENS, width, padded_vocab_size(model.vocab_size, parts) // parts)
    if (experts := model.experts) is not None:
        layout = cfg.moe.expert_mesh(mesh)
        local = experts.num // layout.ep, width, model.expert_d_ff // layout.tensor
        add("grouped_matmul", "experts", 2 * TOKENS, *local)
    if cfg.train.precision == "fp8_block":
        add("fp8_matmul", "fp8_product", TOKENS, d_ff, width)
    return checked


def check_run(
    cfg: Config,
    options: command_line.Options,
    launch: Launch | None,
    tell: Callable[[str], None],
    events: Events,
) -> None:
    """Check the kernels of a run on process 0's first GPU; `tell` gets its lines and `events` each answer.

    Every process of a job calls it, before any takes its devices. Raises `UserError` on all where a kernel is wrong.
    """
    if options.fake_devices is not None or distributed.wants_cpu(os.environ):
        return

    def check_here() -> list[list[str]]:
        try:
            return _on_gpu(cfg, options, launch, tell, events)
        except Exception as error:  # An error of the check itself says nothing about the kernels.
            tell(f"kernels: not checked: {type(error).__name__}: {error}")
            return []

    for name, value, fault in distributed.from_process0("kernels", check_here, 60 + LIMIT_S):
        require(False, name, value, fault)


def _on_gpu(cfg, options, launch, tell, events) -> list[list[str]]:
    """Check on the first GPU that this process is about to take; return the faults."""
    kinds = gpu_kinds()
    if not kinds:
        return []
    gpus = own_gpus(launch, os.environ, len(kinds))
    processes = 1 if launch is None else launch.num_processes or 1
    cluster = cluster_of(kinds[0], processes * len(gpus))
    try:
        cfg = devices.checked(cfg, options, cluster, lambda text: None)
    except UserError:  # The run says it itself, when it knows its devices.
        return []
    environ = {"CUDA_VISIBLE_DEVICES": gpus[0], "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return faults(parts(cfg, kinds[0]), kinds[0], environ, tell, events)


def own_gpus(launch: Launch | None, environ: Mapping[str, str], present: int) -> list[str]:
    """Return CUDA's names of this process's GPUs, on a host of `present`."""
    names = visible_gpus(environ) or [str(number) for number in range(present)]
    chosen = None if launch is None else launch.local_device_ids
    return names if chosen is None else [names[number] for number in chosen]


def faults(
    run_parts: Sequence[Part],
    kind: str,
    environ: Mapping[str, str],
    tell: Callable[[str], None],
    events: Events,
    *,
    module: str = __name__,
    limit_s: float = LIMIT_S,
) -> list[list[str]]:
    """Check the parts in a process of its own; return the name, value and fix of each that is wrong.

    Args:
      run_parts: the parts.
      kind: JAX's name of the GPU.
      environ: variables of the process.
      tell: gets a line before the check, and one for each part.
      events: gets one for each part.
      module: the module that the process runs.
      limit_s: seconds of all checks together.
    """
    if not run_parts:
        return []
    tell(f"kernels: checking {len(run_parts)} on a {kind}, for at most {limit_s:g} s")
    answers = run_checks(run_parts, environ, module, limit_s)
    wrong = []
    for part, answer in zip(run_parts, answers, strict=True):
        [(verdict, words)] = answer.items()
        tell(f"kernels.{part.field}={part.implementation}: {part}: {verdict}: {words}")
        events.record("kernel_check", **dataclasses.asdict(part), answer=answer)
        if verdict == "wrong":
            fix = (
                f"{part} is wrong on a {kind} ({words}); use xla, and report the line with the versions of driver, "
                "cuDNN and JAX"
            )
            wrong.append([f"kernels.{part.field}", part.implementation, fix])
    return wrong


def run_checks(
    run_parts: Sequence[Part], environ: Mapping[str, str], module: str, limit_s: float
) -> list[dict[str, str]]:
    """Return for each part a dict of one item, whose name is `right`, `wrong` or `unchecked`."""
    command = [sys.executable, "-m", module, json.dumps([dataclasses.asdict(p) for p in run_parts])]
    environ = {**os.environ, **environ, SUPERVISOR: str(os.getpid())}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired as timeout:
        output = timeout.stdout or b""
        end = {"unchecked": f"the check was not done after {limit_s:g} s"}
    else:
        # The system sends SIGKILL where memory is short.
        verdict = "unchecked" if done.returncode == -signal.SIGKILL else "wrong"
        last_line = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        output = done.stdout
        end = {verdict: f"the check ended with code {done.returncode}: {last_line[:500]}"}
    answers = [json.loads(line) for line in output.splitlines()]
    skipped = {"unchecked": "an earlier check did not end"}
    return [*answers, *[end, *[skipped] * len(run_parts)]][: len(run_parts)]


def serve(arguments: Sequence[str]) -> None:
    """Check the parts that the parent names, on this process's first device, and print its answers."""
    follow_supervisor(os.environ)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    distributed.set_environment(os.environ)
    fault = _no_gpu()
    for part in json.loads(arguments[0]):
        answer = {"unchecked": fault} if fault else answer_of(Part(**part))
        print(json.dumps(answer), file=answers)


def _no_gpu() -> str:
    """Return why this process has no device to check on, or an empty string."""
    import jax

    try:
        backend = jax.default_backend()
    except RuntimeError as error:
        return str(error)[:500]
    return "" if backend == "gpu" or distributed.wants_cpu(os.environ) else "JAX sees no GPU"


def answer_of(part: Part) -> dict[str, str]:
    """Check a part on this process's first device; see `run_checks`."""
    import jax

    from ultrascale_jax.cli.kernel_numerics import CHECKS, measure

    try:
        check = CHECKS[part.check](*part.sizes, **part.options)
        errors = measure(check, part.implementation, jax.numpy.dtype(part.dtype))
    except Exception as error:
        words = f"{type(error).__name__}: {error}"[:500]
        lacking = any(text in words.lower() for text in ("resource_exhausted", "out of memory"))
        return {"unchecked" if lacking else "wrong": words}
    words = f"relative error {errors.kernel:.1e}, XLA's {errors.xla:.1e}"
    return {"right" if errors.right else "wrong": words}


if __name__ == "__main__":
    serve(sys.argv[1:])
