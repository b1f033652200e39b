"""Compile for GPUs that are not there: XLA's options, and the checks by which JAX queries devices.

XLA's CUDA plugin compiles for a described chip. Without devices the autotuner's choice of kernels is not known.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention
from jaxlib import xla_client

from ultrascale_jax.hlo.live_buffers import MemoryPlan, dumped_plan
from ultrascale_jax.hlo.streams import dumped_streams

DEVICELESS_OPTIONS = {
    # XLA's own collective kernels (instead of NCCL's) ask the devices for peer access, and crash where there are none.
    "xla_gpu_experimental_use_collective_kernels": "",
    # The autotuner has nothing to time on, and compiles its candidates all the same: without it a compilation takes
    # half as long, and memory, operations and schedule are the same.
    "xla_gpu_autotune_level": "0",
}

TOOLKITS = ("/usr/local/cuda", "/opt/cuda")
"""Where XLA looks for ptxas, after PATH and before the wheels of its plugin."""

# XLA reads booleans as text in XLA_FLAGS, but not as compiler options.
BOOLEANS = {"true": True, "false": False}


class Compilation(NamedTuple):
    """A program compiled for GPUs that are not there, and the properties that XLA reveals only in a dump."""

    compiled: jax.stages.Compiled
    seconds: float
    """Time that XLA took."""
    streams: dict[str, int]
    """The stream of each asynchronous collective."""
    memory: MemoryPlan | None
    """Lives of the buffers."""


def has_assembler() -> bool:
    """Return whether XLA will find ptxas, without which it fails or crashes."""
    if "xla_gpu_cuda_data_dir" in os.environ.get("XLA_FLAGS", ""):
        return True
    nvidia = importlib.util.find_spec("nvidia")
    wheels = nvidia.submodule_search_locations if nvidia else None
    places = [os.environ.get("PATH", ""), *(f"{kit}/bin" for kit in TOOLKITS)]
    places += [str(place) for wheel in wheels or () for place in Path(wheel).glob("*/bin")]
    return shutil.which("ptxas", path=os.pathsep.join(places)) is not None


def compile_deviceless(
    lowered: jax.stages.Lowered, flags: Mapping[str, str | int | bool]
) -> Compilation:
    """Compile with these XLA flags, without dashes."""
    options: dict[str, Any] = {
        name: BOOLEANS.get(str(value), value)
        for name, value in {**DEVICELESS_OPTIONS, **flags}.items()
    }
    with uncached(), _dumped(options) as folder:
        start = time.perf_counter()
        compiled = lowered.compile(compiler_options=options)
        seconds = time.perf_counter() - start
        return Compilation(compiled, seconds, dumped_streams(folder), dumped_plan(folder))


def text_of(compiled: jax.stages.Compiled) -> str:
    """Return the scheduled program with all elements of its constants, which `as_text` leaves out beyond ten."""
    executable = compiled.runtime_executable()
    assert executable is not None  # XLA:GPU has one
    [module] = executable.hlo_modules()
    printing = xla_client.hlo.HloPrintOptions()
    printing.print_large_constants = True
    return module.to_string(printing)


@contextlib.contextmanager
def _dumped(options: dict[str, Any]) -> Iterator[Path]:
    """Let XLA dump, unless XLA_FLAGS do already, and yield the directory: only a dump contains the streams."""
    user_folder = re.search(r"--xla_dump_to=(\S+)", os.environ.get("XLA_FLAGS", ""))
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.setdefault("xla_dump_to", user_folder[1] if user_folder else temporary)
        yield Path(str(folder))


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Keep out of JAX's persistent compilation cache, which cannot read back its entries for absent devices."""
    name = "jax_persistent_cache_min_compile_time_secs"
    saved_value = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, saved_value)


@contextlib.contextmanager
def target_checks(capability: tuple[int, int], cudnn: int) -> Iterator[None]:
    """Show JAX's cuDNN attention the target's compute capability and cuDNN version, not this machine's.

    JAX looks at local devices and at the installed cuDNN when it traces the call; XLA needs neither to compile it.
    """
    answers = {
        "check_cudnn_version": lambda: cudnn,
        "check_compute_capability": lambda least: capability >= _version(least),
        "is_cuda_compute_capability_equal": lambda exact: capability == _version(exact),
    }
    saved_checks = {name: getattr(cudnn_attention, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(cudnn_attention, name, answer)
        yield
    finally:
        for name, function in saved_checks.items():
            setattr(cudnn_attention, name, function)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
