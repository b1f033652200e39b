"""Try the kernels that a run leaves to `auto`, on the GPU that it is about to take.

For each such kernel that takes the run's shapes, process 0 starts a process of its own on one Hopper GPU. It computes
that part of a layer by the kernel and by XLA (`bench_peers/layer_works.py`), forward and backward, compares the results
with XLA's in float32, and times both in turns. The run takes a kernel that is right and faster. It takes XLA's version
where the kernel crashes, hangs, is wrong or is not faster: a trial that fails, however it does, stops no run.

A GPU that a run has taken has no memory left for a trial, so the trial comes first, on the shapes of the GPUs that the
driver and the launcher tell of. All processes get process 0's verdicts. They are events of the run and stay in this
host's cache, so the next start with the same GPU, version of JAX, kernels and shapes tries nothing.
"""

import contextlib
import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from ultrascale_jax.cli import command_line
from ultrascale_jax.cli.bench_peers import layer_works, turns
from ultrascale_jax.cli.bench_peers.contestant import Program, Unavailable
from ultrascale_jax.cli.bench_peers.runner import Failed, OutOfTime, Process
from ultrascale_jax.cli.bench_peers.works import BF16_DOT, MOSAIC, XLA
from ultrascale_jax.config import Config, UserError
from ultrascale_jax.kernels import device as kernels_device
from ultrascale_jax.kernels import (
    fp8_matmul_mosaic,
    grouped_matmul_mosaic,
    linear_cross_entropy_mosaic,
    rms_norm_mosaic,
)
from ultrascale_jax.launch import distributed
from ultrascale_jax.launch.cluster import Launch, visible_gpus
from ultrascale_jax.launch.events import Events, parse_object, read_events
from ultrascale_jax.launch.procfs import gpu_kinds
from ultrascale_jax.parallel.experts.capacity import expert_capacity_factor
from ultrascale_jax.plan.auto import cluster_of
from ultrascale_jax.storage.cache import cache_folder, name_of, write_shared

WORKS = {
    "norm": "layer_norm",
    "loss": "layer_loss",
    "grouped_matmul": "layer_experts",
    "fp8_matmul": "layer_fp8_block",
}
"""The work of `layer_works.py` by the field of `kernels` that chooses its implementation."""

MODULE = turns.__name__

FASTER = 1.02
"""Times XLA's speed that a kernel must reach: the clock of a GPU moves by some percent."""

RIGHT = 4e-3
"""Largest relative error, in the Frobenius norm, that the kernels' tests allow of a bfloat16 result."""

LIMIT_S = 90.0
"""Seconds for the trial of one kernel; most of them are XLA's, which tries its own products on the GPU."""

STEPS, CALLS = 15, 4
"""Steps of each side that are timed, and calls of a step."""

LEAST_ELEMENTS = 2**22
"""Elements of the residual stream on a GPU from which kernels are tried: an H100 reads so many in 3 microseconds."""


@dataclass(frozen=True)
class Trial:
    """A part of a run that a kernel or XLA can compute."""

    field: str
    """Of `kernels`."""
    shape: tuple[float, ...]
    """Arguments of its function in `layer_works.py`."""


@dataclass(frozen=True)
class Verdict:
    """The implementation of a part, and why it is taken."""

    implementation: str
    """`mosaic` or `xla`."""
    reason: str
    key: str
    """Name of all that it depends on: trial, GPU, versions, sources."""


type Verdicts = dict[Trial, Verdict]

type Answer = tuple[str, str]
"""Implementation and reason."""


def trials(cfg: Config) -> list[Trial]:
    """Return the parts of a run that are `auto` and whose shapes a kernel takes.

    `cfg` is checked, and open in nothing else.
    """
    mesh, model, tensor = cfg.mesh, cfg.model, cfg.mesh.tensor
    rows = cfg.train.global_batch // (mesh.batch * cfg.train.microbatches)
    length, width = cfg.data.seq_len // mesh.cp, model.d_model
    tokens, words = rows * length, model.vocab_size // (tensor * mesh.pp)
    found: dict[str, tuple[float, ...]] = {}
    if tokens // mesh.sp * width < LEAST_ELEMENTS or cfg.train.precision in ("fp16", "fp32"):
        return []
    if rms_norm_mosaic.takes(width):
        found["norm"] = tokens // mesh.sp, width
    # An evaluation may have other numbers of sequences.
    if linear_cross_entropy_mosaic.takes(length, width, words):
        found["loss"] = tokens, width, words
    if (experts := model.experts) is not None:
        chosen, num = tokens * experts.top_k, experts.num // mesh.ep
        d_ff, room = model.expert_d_ff // tensor, expert_capacity_factor(cfg.moe, experts, mesh.ep)
        if grouped_matmul_mosaic.takes(0, width, d_ff):
            found["grouped_matmul"] = chosen, num, width, d_ff, room
    sizes = tokens, model.d_ff // tensor, width
    if cfg.train.precision == "fp8_block" and fp8_matmul_mosaic.takes(*sizes):
        found["fp8_matmul"] = sizes
    return [Trial(*item) for item in found.items() if _may_choose(cfg, item[0])]


def _may_choose(cfg: Config, field: str) -> bool:
    """Return whether the run leaves a field to `auto`, and could have the kernel."""
    if getattr(cfg.kernels, field) != "auto":
        return False
    with contextlib.suppress(UserError):
        with_kernels(cfg, {field: MOSAIC}).check(math.prod(cfg.mesh.sizes.values()))
        return True
    return False


def with_kernels(cfg: Config, implementations: Mapping[str, str]) -> Config:
    """Return `cfg` with these fields of `kernels`."""
    kernels = dataclasses.replace(cfg.kernels, **implementations)  # pyrefly: ignore
    return dataclasses.replace(cfg, kernels=kernels)


def settle(
    cfg: Config, options: command_line.Options, launch: Launch | None, tell: Callable[[str], None]
) -> Verdicts:
    """Return what the kernels that `cfg` leaves open should be, as process 0 finds it; `tell` gets its lines.

    Every process of a job calls it, before any takes its devices.
    """
    is_open = any(getattr(cfg.kernels, field) == "auto" for field in WORKS)
    on_cpu = options.devices is not None or distributed.wants_cpu(os.environ)
    if on_cpu or not is_open:
        return {}

    def found_here() -> list:
        try:
            found = _on_gpus(cfg, options, launch, tell)
        except Exception as error:  # Whatever it is, XLA computes all of it.
            tell(f"no kernel was tried: {type(error).__name__}: {error}")
            found = {}
        return [(*dataclasses.astuple(t), *dataclasses.astuple(v)) for t, v in found.items()]

    rows = distributed.from_process0("kernels", found_here, 60 + LIMIT_S * len(WORKS))
    return {Trial(row[0], tuple(row[1])): Verdict(*row[2:]) for row in rows}


def _on_gpus(
    cfg: Config, options: command_line.Options, launch: Launch | None, tell: Callable[[str], None]
) -> Verdicts:
    """Return the verdicts for the GPUs that this process is about to take."""
    kinds = gpu_kinds()
    if len(set(kinds)) != 1 or not kernels_device.is_hopper(kinds[0]):
        return {}
    own = own_gpus(launch, os.environ, len(kinds))
    processes = 1 if launch is None else launch.num_processes or 1
    cluster = cluster_of(kinds[0], processes * len(own))
    wanted = trials(command_line.checked(cfg, options, cluster, lambda text: None))
    environ = {"CUDA_VISIBLE_DEVICES": own[0], "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return decide(wanted, kinds[0], Path(cfg.log.run_dir), environ, tell)


def own_gpus(launch: Launch | None, environ: Mapping[str, str], present: int) -> list[str]:
    """Return CUDA's names of this process's GPUs, on a host of `present`."""
    names = visible_gpus(environ) or [str(number) for number in range(present)]
    chosen = None if launch is None else launch.local_device_ids
    return names if chosen is None else [names[number] for number in chosen]


def decide(
    wanted: Sequence[Trial],
    kind: str,
    run_dir: Path,
    environ: Mapping[str, str],
    tell: Callable[[str], None],
    *,
    module: str = MODULE,
    limit_s: float = LIMIT_S,
) -> Verdicts:
    """Return a verdict for each trial: a remembered one, or that of a trial on the GPU of `kind` in `environ`.

    Args:
      wanted: the trials.
      kind: JAX's name of the GPU.
      run_dir: of the run, in whose events a verdict may stand.
      environ: variables of the processes that try.
      tell: gets a line for each verdict, and one before the first trial.
      module: what these processes run; it serves as `bench_peers/turns.py`.
      limit_s: seconds of each.
    """
    events, found = read_events(run_dir), {}
    for trial in wanted:
        key = _key(trial, kind)
        answer = _remembered(events, key)
        if answer is None:
            words = f"trying its kernel on a {kind}, for at most {limit_s:g} s"
            tell(f"kernels.{trial.field}: {words}")
            answer, lasts = try_kernel(trial, environ, module=module, limit_s=limit_s)
            if lasts:
                _keep(key, *answer)
        found[trial] = verdict = Verdict(*answer, key)
        tell(f"kernels.{trial.field}={verdict.implementation}: {verdict.reason}")
    return found


def try_kernel(
    trial: Trial, environ: Mapping[str, str], *, module: str, limit_s: float
) -> tuple[Answer, bool]:
    """Compare and time a kernel and XLA's version in a process of its own.

    Return the answer, and whether another trial would find the same: it might not where the GPU had no room, or time
    was up.
    """
    needs_gpu = environ.get("JAX_PLATFORMS") != "cpu"
    spec = {"kernel": WORKS[trial.field], "shape": trial.shape, "calls": CALLS}
    text, deadline = json.dumps(spec | {"needs_gpu": needs_gpu}), time.monotonic() + limit_s
    slow = "; XLA multiplies in float32 then, slower than train.precision bf16, fp8 or fp8_rowwise"
    slow = slow if trial.field == "fp8_matmul" else ""
    try:
        with Process(module, text, environ=environ, deadline=deadline) as process:
            programs = [Program(**fields) for fields in process.ready()["programs"]]
            process.run(len(programs))
            step_s = process.run(len(programs) * STEPS)["step_s"]
    except OutOfTime:
        return (XLA, f"the trial was not done after {limit_s:g} s{slow}"), False
    except Unavailable as fault:
        return (XLA, f"no trial: {fault}{slow}"), False
    except Failed as fault:
        return (XLA, f"the trial failed: {fault}{slow}"), not fault.out_of_memory
    implementation, reason = judged(programs, step_s)
    return (implementation, reason + slow * (implementation == XLA)), True


def judged(programs: Sequence[Program], step_s: Sequence[float]) -> Answer:
    """Return the answer of a trial whose n programs took turns: program i made every n-th step, from the i-th on."""
    errors = {program.contestant: program.figures["error"] for program in programs}
    times = {
        program.contestant: step_s[number :: len(programs)]
        for number, program in enumerate(programs)
    }

    def speed(name: str) -> float:
        """Return the kernel's speed relative to another's, of neighbours in time."""
        pairs = zip(times[name], times[MOSAIC], strict=True)
        return statistics.median(other / own for other, own in pairs)

    error = f"relative error {errors[MOSAIC]:.1e}, XLA's {errors[XLA]:.1e}"
    if not errors[MOSAIC] <= max(RIGHT, 2 * errors[XLA]):
        return XLA, f"the kernel is wrong: {error}"
    figures = f"the kernel has {speed(XLA):.2f} times XLA's speed; {error}"
    if BF16_DOT in times:
        figures = f"{figures}; it has {speed(BF16_DOT):.2f} times the speed of bfloat16"
    return MOSAIC if speed(XLA) >= FASTER else XLA, figures


def settled(cfg: Config, verdicts: Verdicts, tell: Callable[[str], None]) -> Config:
    """Return `cfg`, checked for the devices that JAX found, with the verdicts on its parts; `tell` gets lines.

    A part that turns out to have another shape than was tried is XLA's.
    """
    tried = {trial.field: trial.shape for trial in verdicts}
    chosen = {}
    for trial in trials(cfg) if verdicts else ():
        if trial in verdicts:
            chosen[trial.field] = verdicts[trial].implementation
        elif trial.field in tried:
            found = f"{tried[trial.field]} was tried, and the run has {trial.shape}"
            tell(f"kernels.{trial.field}={XLA}: {found}")
            chosen[trial.field] = XLA
    if chosen.get("fp8_matmul") == MOSAIC:
        # It does not take every product, and `auto` computes the others by XLA.
        del chosen["fp8_matmul"]
    return with_kernels(cfg, chosen)


def untried(cfg: Config, kind: str) -> str:
    """Return a line that names the parts that a run on GPUs of `kind` tries and a plan leaves to XLA, or an empty one.

    `cfg` is checked.
    """
    fields = [f"kernels.{t.field}" for t in trials(cfg) if t.field != "fp8_matmul"]
    if not fields or not kernels_device.is_hopper(kind):
        return ""
    after = "a run tries its kernel when it starts on the GPUs, and takes it if it is faster"
    return f"{', '.join(fields)}: XLA's in this program; {after}"


def record(verdicts: Verdicts, events: Events) -> None:
    """Record the verdicts of a run that begins."""
    for trial, verdict in verdicts.items():
        events.record(
            "kernel_trial",
            field=trial.field,
            shape=trial.shape,
            implementation=verdict.implementation,
            reason=verdict.reason,
            key=verdict.key,
        )


def _key(trial: Trial, kind: str) -> str:
    """Return `Verdict.key`."""
    files = sorted(Path(kernels_device.__file__).parent.glob("*.py"))
    sources = b"".join(path.read_bytes() for path in [*files, Path(layer_works.__file__)])
    versions = jax.__version__, jax.lib.__version__
    return name_of(json.dumps([*dataclasses.astuple(trial), kind, *versions, name_of(sources)]))


def _remembered(events: Sequence[dict], key: str) -> Answer | None:
    """Return the answer that an earlier start found: one of this run, or else on this host."""
    rows = [row for row in events if (row["kind"], row.get("key")) == ("kernel_trial", key)]
    with contextlib.suppress(OSError):
        rows.insert(0, parse_object(_place(key).read_bytes()))
    for row in reversed(rows):
        implementation, reason = row.get("implementation"), row.get("reason")
        if implementation in (MOSAIC, XLA) and isinstance(reason, str):
            return implementation, reason
    return None


def _keep(key: str, implementation: str, reason: str) -> None:
    """Write into this host's cache, if that can be."""
    row = {"implementation": implementation, "reason": reason}
    with contextlib.suppress(OSError):
        write_shared(_place(key), json.dumps(row).encode())


def _place(key: str) -> Path:
    return cache_folder("kernels") / f"{key}.json"
