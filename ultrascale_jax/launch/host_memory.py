"""The host's memory that a process may pin for activations of its GPUs, and how fast they copy to it.

XLA takes pinned memory as it needs it, up to `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` of a process (64 where that is not
set), in regions whose sizes are powers of two.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, MutableMapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import HOST_MEMORY_SHARE, require
from ultrascale_jax.launch import procfs
from ultrascale_jax.launch.cluster import Launch, visible_gpus

LIMIT, UNSET_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64
"""XLA's variable, and its default, in GiB."""

COPIED, TIMES = 2**29, 5
"""Bytes of each GPU in a copy that is timed, some 10 ms of PCIe 5.0, and how often."""

RESERVED = 4 * COPIED
"""Bytes that each GPU's timed copies and other transfers to and from the host leave pinned."""


def set_limit(environ: MutableMapping[str, str], launch: Launch | None) -> None:
    """Let XLA pin this process's share of the host's memory; keep the user's setting. Call it before JAX's first array.

    The GPUs of the machine share its memory equally; the GPUs of a container share the container's limit.
    """
    present = len(procfs.gpu_kinds())
    if present:
        visible = visible_gpus(environ)
        shown = present if visible is None else len(visible)
        ids = None if launch is None else launch.local_device_ids
        share = process_bytes(procfs.memory(), present, shown, shown if ids is None else len(ids))
        environ.setdefault(LIMIT, str(max(1, share // 2**30)))


def process_bytes(memory: procfs.Memory, present: int, shown: int, used: int) -> int:
    """Return the bytes that a process with `used` GPUs may pin, of `shown` in its container and `present` in all."""
    one = min(memory.total / present, memory.limit / shown)
    return int(HOST_MEMORY_SHARE * one * used)


def gpu_bytes(environ: Mapping[str, str], num_gpus: int) -> int:
    """Return the pinned bytes that each of a process's GPUs may take at most.

    Several GPUs take regions of XLA's sizes, so one of another size would leave some of them without. Raises
    `UserError` if the user's limit is no number.
    """
    text = environ.get(LIMIT, str(UNSET_GIB))
    require(text.isdecimal(), LIMIT, text, "must be an integer, in GiB")
    one = int(text) * 2**30 // num_gpus - RESERVED
    return max(0, one) if num_gpus == 1 or one <= 0 else 2 ** int(math.log2(one))


def prepare_copies(copied: int = COPIED) -> Callable[[], float]:
    """Return a function that times copies of `copied` bytes of each local GPU to pinned memory of the host, and back.

    All local GPUs copy at once. The function returns the 1e9 bytes a second of one GPU, in the slower direction; all is
    compiled and has its memory before.
    """
    devices = jax.local_devices()
    mesh = Mesh(np.array(devices), ("gpu",), axis_types=(AxisType.Auto,))
    on_device = NamedSharding(mesh, P("gpu"))
    on_host = on_device.with_memory_kind("pinned_host")
    shape = len(devices), copied
    x = jax.jit(lambda: jnp.zeros(shape, jnp.uint8), out_shardings=on_device)()
    to_host = jax.jit(lambda x: jax.device_put(x, on_host), out_shardings=on_host)
    to_device = jax.jit(lambda x: jax.device_put(x, on_device), out_shardings=on_device)
    y = jax.block_until_ready(to_host(x))

    def gbs() -> float:
        return copied / max(_seconds(to_host, x), _seconds(to_device, y)) / 1e9

    gbs()
    return gbs


def _seconds(copy: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Return the median time of `copy`."""
    times = []
    for _ in range(TIMES):
        start = time.perf_counter()
        jax.block_until_ready(copy(x))
        times.append(time.perf_counter() - start)
    return statistics.median(times)
