"""Compile the training step for GPUs that are not there, and report its memory and time.

XLA's CUDA plugin compiles for a described chip (`hardware.py`). `compile_step` compiles the very program that
`train_step/step.py` would run, `compile_program` any other; `simulate_step` says how long it takes. The result is real:
XLA's own buffer assignment and schedule. Not known without a GPU is the autotuner's choice of kernels: products are the
Triton kernels that XLA picks by its cost model. Needs the plugin and NVIDIA's assembler (extra `aot`), no GPU and no
other part of CUDA.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from ultrascale_jax import hlo
from ultrascale_jax.config import Config, UserError, require, require_type
from ultrascale_jax.config.lowering import Lowering
from ultrascale_jax.hlo.attention import unplanned_workspace
from ultrascale_jax.hlo.collectives import Collective, find_collectives
from ultrascale_jax.hlo.deviceless import compile_deviceless, has_assembler, target_checks, text_of
from ultrascale_jax.hlo.live_buffers import CLASSES, MemoryPlan, live_bytes
from ultrascale_jax.kernels.xla import known_options
from ultrascale_jax.launch.distributed import GPU_FLAGS
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.plan.compiled.timeline import COMPUTE, LOOP, Event, Timeline, simulate
from ultrascale_jax.plan.formulas import context, costs, pipeline
from ultrascale_jax.plan.hardware import GPUS, Cluster, Gpu, find_gpu
from ultrascale_jax.plan.prediction import BOUNDS, StepPrediction
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.state import abstract_batch, abstract_state
from ultrascale_jax.train_step.step import make_train_step

# Writes XLA's own estimates of time into the program (`op_costs.py`). It needs XLA's tables of measurements, of which
# XLA 0.12 has none for A100 and L40S and cannot read those for GB200: it fails on them.
ESTIMATES = {"xla_gpu_collect_cost_model_stats": "true"}
ESTIMATED = ("NVIDIA H100", "NVIDIA H200", "NVIDIA B200")

WORK = {"gemm": "matrix products", "other": "other work"}
"""Kinds of work of a timeline, as the formulas call them."""

RARE_LOOPS = ("moe", "from_highest_logits")
"""Named scopes whose loops of unknown length run in few steps: more rounds of experts, and `models/loss.py` again."""


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """A program as XLA would run it; sizes in bytes on one GPU."""

    gpu: Gpu
    """The GPU that it is compiled for."""
    text: str
    """Scheduled HLO."""
    axes: dict[str, int]
    """Mesh axis to size."""
    argument_bytes: int
    """Size of a step state and batch; what is donated gives its place to results."""
    temporary_bytes: int
    """Everything else that lives at once, at most."""
    host_bytes: int
    """Activations and moments in the host's memory."""
    peak_bytes: int
    """Most memory in use at any time, arguments included, without `workspace_bytes`."""
    compile_s: float
    """Seconds that XLA took, tracing not included."""
    comm_streams: Mapping[str, int] = field(default_factory=dict)
    """The stream on which XLA put each asynchronous collective; XLA's first, 0, for a collective that is not named."""
    memory_plan: MemoryPlan | None = None
    """XLA's plan of the memory, buffer by buffer."""

    @cached_property
    def module(self) -> hlo.Module:
        """The program, parsed."""
        return hlo.parse(self.text)

    @cached_property
    def workspace_bytes(self) -> int:
        """Memory that cuDNN's attention needs in addition to XLA's plan, at least."""
        return unplanned_workspace(self.module)

    @cached_property
    def collectives(self) -> list[Collective]:
        """Every collective of the program; one in a loop is listed once, and runs `times` in a step."""
        return find_collectives(self.module, self.axes)

    @cached_property
    def matmuls(self) -> list[hlo.Matmul]:
        """Every matrix product and attention call of the program."""
        return hlo.matmuls(self.module)


@dataclass(frozen=True, kw_only=True)
class CompiledStep(CompiledProgram):
    """One training step of `run`."""

    run: Run


def target_devices(
    num_devices: int, gpu: str = "h100", gpus_per_host: int | None = None
) -> list[jax.Device]:
    """Return `num_devices` GPUs that exist for the compiler only, `gpus_per_host` (default: as usual) to a host.

    Raises:
      UserError: the GPU is unknown, XLA cannot read its description, the last host would not be full, or XLA's CUDA
        plugin or NVIDIA's assembler is not installed.
    """
    chosen = find_gpu(gpu)
    fix = (
        "XLA compiles only for a GPU that it has a description of: take a name, or FILE or NAME:FILE, a "
        "GpuTargetConfig; formulas (plan memory, plan guide, plan search --compile 0) do take it"
    )
    require(chosen.target != "", "gpu", gpu, fix)
    require(num_devices > 0, "num_devices", num_devices, "must be at least 1")
    host = min(gpus_per_host or chosen.host, num_devices)
    fix = (
        f"must be a multiple of {host}, the GPUs of a host, or less than one host; "
        "give other hosts as gpus_per_host, or --cluster NODESxGPUS,INTRA,INTER"
    )
    require(num_devices % host == 0, "num_devices", num_devices, fix)
    if not has_assembler():
        raise UserError(
            f"gpu={gpu!r}: compiling for it needs NVIDIA's assembler, ptxas: pip install 'ultrascale_jax[aot]'"
        )
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=chosen.target,
            topology=f"1x{num_devices // host}x{host}",
        )
    except (RuntimeError, KeyError) as error:
        is_read = "GpuTargetConfigProto" not in str(error)
        require(is_read, "gpu", gpu, "XLA does not read the file as its GpuTargetConfig")
        raise UserError(
            f"gpu={gpu!r}: compiling for it needs XLA's CUDA plugin: pip install 'ultrascale_jax[aot]', and without a "
            "GPU in this machine set JAX_PLATFORMS=cpu before JAX starts"
        ) from error
    return topology.devices


def compile_step(
    cfg: Config,
    num_devices: int,
    gpu: str = "h100",
    *,
    gpus_per_host: int | None = None,
    model: type[Transformer] = Transformer,
    estimates: bool = True,
    options: Mapping[str, str] | None = None,
    document_tokens: int | None = None,
) -> CompiledStep:
    """Compile `make_train_step(cfg)` for `num_devices` GPUs with the XLA flags of a real run.

    Args:
      cfg: a run; its mesh is checked here.
      num_devices, gpu, gpus_per_host: as `target_devices` takes them.
      model: the class of the model, with layers of your own say (`docs/layers.md`).
      estimates, options: as `compile_program` takes them; `options` are added to the flags of a run.
      document_tokens: as `Run` has it; the program is the same.
    """
    mesh = make_mesh(cfg.mesh, target_devices(num_devices, gpu, gpus_per_host))
    cfg = cfg.check(num_devices)
    flags = {**GPU_FLAGS, **known_options(Lowering.of(cfg).xla_options), **(options or {})}
    step = make_train_step(cfg)
    args = abstract_state(cfg, mesh, model), abstract_batch(cfg, mesh)
    program = compile_program(step, *args, mesh=mesh, gpu=gpu, estimates=estimates, options=flags)
    run = Run.of(cfg, num_devices, document_tokens=document_tokens)
    return CompiledStep(run=run, **vars(program))


def compile_program(
    function: jax.stages.Wrapped,
    *args: Any,
    mesh: Mesh,
    gpu: str | None = None,
    estimates: bool = True,
    options: Mapping[str, str | int | bool] | None = None,
) -> CompiledProgram:
    """Compile a jitted function of your own for GPUs that are not there.

    Args:
      function: what `jax.jit` returns; it is traced inside `mesh`.
      args: its arguments, as `jax.ShapeDtypeStruct`s with shardings on `mesh`.
      mesh: of `target_devices`.
      gpu: the one that `target_devices` was given; by default the known one of their kind.
      estimates: let XLA write its estimates of time into the text, where it can for this GPU: `simulate_step` reads
        them. Without them XLA takes three quarters of the time.
      options: XLA flags without dashes.

    Raises:
      UserError: the mesh is not of `target_devices`, or of another GPU's.
    """
    fix = "is no result of jax.jit"
    require(isinstance(function, jax.stages.Wrapped), "function", function, fix)
    target, flags = _gpu_of(mesh, gpu), dict(options or {})
    if estimates and target.kind.startswith(ESTIMATED):
        flags |= ESTIMATES
    with jax.set_mesh(mesh), target_checks(target.capability, target.cudnn):
        compilation = compile_deviceless(function.lower(*args), flags)
    compiled = compilation.compiled
    memory, text = compiled.memory_analysis(), text_of(compiled)
    assert memory is not None  # XLA:GPU always has it
    return CompiledProgram(
        gpu=target,
        text=text,
        axes=dict(mesh.shape),
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        host_bytes=memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes,
        # XLA's is the highest of all memories, the host's too, whose arguments are there all the time.
        peak_bytes=min(
            memory.peak_memory_in_bytes - memory.host_argument_size_in_bytes,
            memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        ),
        compile_s=compilation.seconds,
        comm_streams=compilation.streams,
        memory_plan=compilation.memory,
    )


def _gpu_of(mesh: Mesh, name: str | None) -> Gpu:
    """Return the GPU of that name, or else the known one of the kind of the mesh's devices, which must be of it."""
    device = mesh.devices.flat[0]
    fix = "must be of target_devices(num_devices)"
    require(device.platform == "gpu", "mesh", device.platform, fix)
    kind = device.device_kind
    if name is not None:
        gpu = find_gpu(name)
        fix = (
            f"the devices of mesh are {kind}s; leave gpu out, or give what target_devices was given"
        )
        require(gpu.target_kind == kind, "gpu", name, fix)
        return gpu
    match = next((gpu for gpu in GPUS.values() if gpu.kind == kind), None)
    fix = (
        f"the devices of mesh are {kind}s, which no name tells; give what target_devices was given"
    )
    require(match is not None, "gpu", name, fix)
    assert match is not None
    return match


def simulate_step(step: CompiledProgram, cluster: Cluster) -> Timeline:
    """Predict how one GPU of `cluster` spends its time on `step`.

    Packed documents have the length that its run has. Collectives are on the streams that XLA put them on; the
    timeline also tells the step with all of them on one stream, with none that waits for another of another link, and
    with the most that a study found collectives to slow work overlapped with them. A conditional takes its slowest
    branch as often as the pipeline's schedule, or the layers with experts, make it. A loop of unknown length may count
    nothing only if it runs further rounds of unbalanced experts: others raise a warning.

    Raises `UserError` where the cluster has other GPUs, or another number of them, than the program is compiled for.
    """
    require_type("step", step, CompiledProgram, "compile_step and compile_program make one")
    require_type("cluster", cluster, Cluster, "find_cluster(None, 'h100', num_gpus) makes one")
    axes = ",".join(f"{axis}={size}" for axis, size in step.axes.items() if size > 1)
    fix = f"the program is compiled for {step.gpu.name}; give its cluster, or compile it for {cluster.gpu.name}"
    require(cluster.gpu.kind == step.gpu.kind, "cluster.gpu", cluster.gpu.name, fix)
    cluster.check_size(math.prod(step.axes.values()), f"the program's mesh {axes}")
    run = step.run if isinstance(step, CompiledStep) else None
    share = pipeline.shares(run, step.module) if run else None
    trips = functools.partial(context.loop_trips, run) if run else None
    names = [c.name for c in step.collectives if c.asynchronous]
    one = dict.fromkeys(names, 0)
    own_streams = {name: step.comm_streams.get(name, 0) for name in names}

    def replay(streams: Mapping[str, int], contention: float | None = None) -> Timeline:
        return simulate(
            step.module,
            step.axes,
            cluster,
            comm_streams=streams,
            share=share,
            trips=trips,
            document_tokens=run.document_tokens if run else None,
            contention=contention,
        )

    timeline = replay(own_streams)
    timeline = dataclasses.replace(
        timeline,
        one_stream_s=timeline.step_s if own_streams == one else replay(one).step_s,
        side_by_side_s=replay({}).step_s,
        contended_s=replay(own_streams, costs.CONTENTION).step_s,
    )
    known_rare = {where for where in timeline.left_out for scope in RARE_LOOPS if scope in where}
    if wrong := sorted(set(timeline.left_out) - known_rare):
        warnings.warn(
            f"{f'{run.label}: ' if run else ''}the predicted time lacks {', '.join(wrong)}, whose length XLA "
            "does not know",
            stacklevel=2,
        )
    return timeline


def predict_step(step: CompiledStep, timeline: Timeline, gpu: Gpu) -> StepPrediction:
    """Join XLA's memory of `step` and the time of `simulate_step` on `gpu`."""
    parts = {WORK.get(kind, kind): seconds for kind, seconds in timeline.busy_s.items()}
    parts |= {f"exposed {axes}": seconds for axes, seconds in timeline.exposed_s.items()}
    parts["other waiting"] = timeline.step_s - sum(parts.values())
    return StepPrediction(
        run=step.run,
        gpu=gpu,
        source="compiled",
        step_s=timeline.step_s,
        parts=parts,
        peak_bytes=step.peak_bytes,
        host_bytes=step.host_bytes,
        gap_bytes=step.argument_bytes + step.temporary_bytes - step.peak_bytes,
        workspace_bytes=step.workspace_bytes,
        **{name: getattr(timeline, name) for name in BOUNDS},
    )


def memory_over_step(
    step: CompiledProgram, timeline: Timeline
) -> tuple[list[float], dict[str, list[int]]]:
    """Return when the memory in use changes, seconds from the start of `timeline`, and from then on the bytes of each
    class of buffers (`hlo/live_buffers.py`) that XLA's plan has.

    Iterations of a loop that the timeline does not show are counted with the loop's largest memory. Empty where XLA has
    no plan.
    """
    plan, module = step.memory_plan, step.module
    if plan is None:
        return [], {}
    live = live_bytes(plan, module)
    loops = {
        i.name: i for body in module.computations.values() for i in body if i.opcode == "while"
    }

    def position(event: Event) -> int | None:
        if event.kind != LOOP:
            return plan.positions.get(event.name)
        loop = loops[event.name.partition(":")[0]]
        body = [plan.positions[i.name] for i in module.computations[module.loop(loop)[0]]]
        return min(body) + int(live[min(body) : max(body) + 1].sum(axis=1).argmax())

    times, rows = [], []
    for event in timeline.streams[COMPUTE]:
        if (index := position(event)) is not None and (not rows or (live[index] != rows[-1]).any()):
            times.append(event.start_s)
            rows.append(live[index])
    table = np.array(rows).T.tolist()
    return times, {kind: row for kind, row in zip(CLASSES, table, strict=True) if any(row)}
