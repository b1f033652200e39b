"""Compile the training step for GPUs that are not there, and say what it needs.

XLA's CUDA plugin compiles for a described chip: `targets/*.txtpb` holds the description, `target_devices` lays out as
many as wanted, eight to a host, and `compile_step` compiles the very program that `training/step.py` would run on them.
The result is real: XLA's own buffer assignment and schedule. What is not known without a GPU is the autotuner's choice
of kernels, so matrix products are the Triton kernels that XLA picks by its cost model. Needs only the plugin's wheels
(extra `aot`), no GPU, driver or CUDA libraries.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from ultrascale_jax.config import GPUS_PER_NODE, Config, require
from ultrascale_jax.distributed import GPU_FLAGS
from ultrascale_jax.mesh import make_mesh
from ultrascale_jax.plan import hlo, traffic
from ultrascale_jax.sharding import act
from ultrascale_jax.training.state import abstract_state
from ultrascale_jax.training.step import make_train_step


@dataclass(frozen=True)
class Target:
    """A GPU that XLA can compile for."""

    description: str
    """File in `targets/`: XLA's `GpuTargetConfig` as a text proto."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    cudnn: int
    """Version of cuDNN on the target, as cuDNN counts: 91000 is 9.10.0."""


TARGETS = {"h100": Target("h100_sxm.txtpb", (9, 0), 91000)}

# XLA's own collective kernels (instead of NCCL's) ask the devices for peer access, which crashes where there are none.
DEVICELESS_OPTIONS = {"xla_gpu_experimental_use_collective_kernels": ""}

# As compiler options, unlike in XLA_FLAGS, XLA takes no words for booleans.
BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """One training step as XLA would run it; sizes in bytes on one GPU."""

    text: str
    """Scheduled HLO."""
    axes: dict[str, int]
    """Mesh axis to size."""
    argument_bytes: int
    """State and batch; the new state takes the old one's place."""
    temporary_bytes: int
    """Everything else that lives at once, at most."""
    host_bytes: int
    """What is offloaded to the host's memory."""
    peak_bytes: int
    """Most memory in use at any time, arguments included."""
    compile_s: float
    """Seconds that XLA took, tracing not included."""

    @cached_property
    def module(self) -> hlo.Module:
        """The program, parsed."""
        return hlo.parse(self.text)

    @cached_property
    def collectives(self) -> list[traffic.Collective]:
        """Every collective of the program."""
        return traffic.collectives(self.module, self.axes)

    @cached_property
    def matmuls(self) -> list[hlo.Matmul]:
        """Every matrix product and attention call of the program."""
        return hlo.matmuls(self.module)


def target_devices(num_devices: int, gpu: str = "h100") -> list[jax.Device]:
    """`num_devices` GPUs that exist for the compiler only, eight to a host.

    Raises:
      ValueError: the GPU is unknown, or the last host would not be full.
      ModuleNotFoundError: XLA's CUDA plugin is not installed.
    """
    require(gpu in TARGETS, "gpu", gpu, f"choose one of {', '.join(TARGETS)}")
    full = num_devices > 0 and (num_devices % GPUS_PER_NODE == 0 or num_devices < GPUS_PER_NODE)
    require(
        full,
        "num_devices",
        num_devices,
        f"must be a multiple of {GPUS_PER_NODE}, or less than one host",
    )
    hosts = max(1, num_devices // GPUS_PER_NODE)
    description = (
        resources.files(__package__).joinpath("targets", TARGETS[gpu].description).read_text()
    )
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=description,
            topology=f"1x{hosts}x{num_devices // hosts}",
        )
    except (RuntimeError, KeyError) as error:
        raise ModuleNotFoundError(
            "compiling for a GPU needs XLA's CUDA plugin: pip install 'ultrascale_jax[aot]', and without a GPU in this "
            "machine set JAX_PLATFORMS=cpu before JAX starts"
        ) from error
    return topology.devices


def compile_step(
    cfg: Config, num_devices: int, gpu: str = "h100", *, options: Mapping[str, str] | None = None
) -> CompiledStep:
    """Compile `make_train_step(cfg)` for `num_devices` GPUs with the XLA flags of a real run.

    Args:
      cfg: a run; its mesh is checked here.
      num_devices: how many GPUs, eight to a host.
      gpu: one of `TARGETS`.
      options: XLA flags without dashes, added to those of a run.
    """
    mesh = make_mesh(cfg.mesh, target_devices(num_devices, gpu))
    cfg = cfg.check(num_devices)
    with jax.set_mesh(mesh), target_checks(TARGETS[gpu]):
        lowered = make_train_step(cfg).lower(abstract_state(cfg, mesh), abstract_batch(cfg, mesh))
        flags = {**GPU_FLAGS, **DEVICELESS_OPTIONS, **(options or {})}
        compiler_options = {name: BOOLEANS.get(value, value) for name, value in flags.items()}
        start = time.perf_counter()
        with uncached():
            compiled = lowered.compile(compiler_options=compiler_options)
        seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None  # XLA:GPU always has both
    return CompiledStep(
        text=text,
        axes=dict(mesh.shape),
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        host_bytes=memory.host_temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        compile_s=seconds,
    )


def abstract_batch(cfg: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of one global batch."""
    names = (
        "tokens",
        "targets",
        "positions",
        *(("segment_ids",) if cfg.data.document_mask else ()),
    )
    shape, sharding = (cfg.train.global_batch, cfg.data.seq_len), NamedSharding(mesh, act("BT"))
    return {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for name in names}


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Keep out of JAX's persistent compilation cache, which cannot read back what it wrote for absent devices."""
    name = "jax_persistent_cache_min_compile_time_secs"
    own = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, own)


@contextlib.contextmanager
def target_checks(target: Target) -> Iterator[None]:
    """Let JAX's cuDNN attention ask the target, not this machine, for its compute capability and cuDNN version.

    JAX looks at local devices and at the installed cuDNN when it traces the call; XLA needs neither to compile it.
    """
    answers = {
        "check_cudnn_version": lambda: target.cudnn,
        "check_compute_capability": lambda least: target.capability >= _version(least),
        "is_cuda_compute_capability_equal": lambda exact: target.capability == _version(exact),
    }
    own = {name: getattr(cudnn_attention, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(cudnn_attention, name, answer)
        yield
    finally:
        for name, function in own.items():
            setattr(cudnn_attention, name, function)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
