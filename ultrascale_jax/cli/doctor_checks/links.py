"""Measure collectives along each axis of the mesh, beside what `plan` expects of the GPUs' links."""

import socket
import time
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ultrascale_jax.cli.doctor_checks.findings import Finding
from ultrascale_jax.config import AXES
from ultrascale_jax.launch.multihost import gather
from ultrascale_jax.plan.formulas.costs import collective_seconds
from ultrascale_jax.plan.hardware import GPUS, find_cluster
from ultrascale_jax.plan.workload import Group
from ultrascale_jax.sharding.manual import smap

SIZE = {"gpu": 64 * 2**20, "cpu": 2**18}
"""Bytes of one collective on each device."""

TIMES = 10
GOOD, BAD = 0.7, 0.4
"""Shares of the planned bandwidth: from the first on a link is well, below the second it is broken."""


def checks(mesh: Mesh) -> list[Finding]:
    """Measure each axis that joins devices, by the two collectives that training needs most."""
    with jax.set_mesh(mesh):
        return [
            _find(mesh, axis, kind)
            for axis, ranks in mesh.shape.items()
            if ranks > 1
            for kind in ("all-reduce", "all-gather")
        ]


def _measure(mesh: Mesh, axis: str, kind: str) -> tuple[int, float]:
    """Return bytes of the larger side on a device, and the seconds of one collective on the slowest process."""
    ranks = mesh.shape[axis]
    numbers = SIZE[mesh.devices.flat[0].platform] // 4 // ranks * ranks
    own = numbers if kind == "all-reduce" else numbers // ranks
    every = NamedSharding(mesh, P(AXES))
    x = jax.jit(lambda: jnp.ones(own * mesh.size, jnp.float32, out_sharding=every))()
    run = jax.jit(_program(axis, kind))
    jax.block_until_ready([run(x) for _ in range(2)])
    begun = time.perf_counter()
    jax.block_until_ready([run(x) for _ in range(TIMES)])
    return 4 * numbers, max(gather((time.perf_counter() - begun) / TIMES))


def _program(axis: str, kind: str) -> Callable[[jax.Array], jax.Array]:
    if kind == "all-reduce":
        rest = tuple(name for name in AXES if name != axis)
        return smap(lambda x: jax.lax.psum(x, axis), in_specs=P(AXES), out_specs=P(rest))
    return smap(
        lambda x: jax.lax.all_gather(x, axis, tiled=True), in_specs=P(AXES), out_specs=P(AXES)
    )


def _find(mesh: Mesh, axis: str, kind: str) -> Finding:
    size, seconds = _measure(mesh, axis, kind)
    ranks, device = mesh.shape[axis], mesh.devices.flat[0]
    known = next((name for name, gpu in GPUS.items() if gpu.kind == device.device_kind), None)
    planned = None
    if known is not None:
        cluster = find_cluster(None, known, mesh.size)
        members = _group(mesh, axis, cluster.gpus_per_node)
        planned = collective_seconds(cluster, kind, size, members)
    # NCCL's bus bandwidth: the bytes that each link must carry, over the time.
    moved = size * (ranks - 1) / ranks * (2 if kind == "all-reduce" else 1)
    return judge(f"{kind} over {axis}={ranks}", size, moved, seconds, planned)


def judge(name: str, size: int, moved: float, seconds: float, planned: float | None) -> Finding:
    """Compare `seconds` of a collective with those `planned`, which nobody knows for some devices.

    Its larger side has `size` bytes on a device; a link must carry `moved` bytes.
    """
    text = f"{size / 2**20:.2f} MiB at {moved / seconds / 1e9:.2f} GB/s"
    if planned is None:
        return Finding("NOTE", name, f"{text}; not judged on this device")
    share = planned / seconds
    text += f", {share:.0%} of the planned {moved / planned / 1e9:.1f}"
    if share >= GOOD:
        return Finding("OK", name, text)
    fix = "See which link NCCL takes (NCCL_DEBUG=INFO), nvidia-smi nvlink -s and topo -m, and NCCL_IB_HCA"
    return Finding("WARN" if share >= BAD else "FAIL", name, text, fix)


def _group(mesh: Mesh, axis: str, domain: int) -> Group:
    """Return the first group of the axis; devices of a process are on one node, and processes of a host too."""
    column = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)
    devices = column.reshape(-1, mesh.shape[axis])[0]
    if domain > 8:
        # NVLink spans hosts: nodes are counted in its domains.
        nodes = Counter(device.id // domain for device in devices)
    else:
        hosts = gather(socket.gethostname())
        nodes = Counter(hosts[device.process_index] for device in devices)
    return Group(ranks=len(devices), per_node=max(nodes.values()))
