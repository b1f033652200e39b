"""The checks of `ultrascale doctor`. All processes of a job call each of them, in the same order."""

import os
import platform
import shutil
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ultrascale_jax import units
from ultrascale_jax.checkpoint.init_from import check_run_dir
from ultrascale_jax.checkpoint.saving import Probe
from ultrascale_jax.config import AXES, Config, DistConfig, UserError
from ultrascale_jax.launch.cluster import Launch
from ultrascale_jax.launch.distributed import check_devices
from ultrascale_jax.launch.multihost import gather
from ultrascale_jax.plan.formulas.costs import collective_seconds
from ultrascale_jax.plan.hardware import Cluster, find_cluster, gpu_of_kind
from ultrascale_jax.plan.workload import Group
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.train_step.state import abstract_state

SIZE, TIMES = {"gpu": 64 * 2**20, "cpu": 2**18}, 10
"""Bytes of an all-reduce on each device, and how often it runs."""

GOOD, BAD = 0.7, 0.4
"""Shares of the planned bandwidth: from the first on a link is well, below the second it is broken."""


@dataclass(frozen=True)
class Finding:
    """One line of the report: OK, NOTE (which judges nothing), WARN or FAIL."""

    verdict: str
    name: str
    text: str


def of_all(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of all processes, each once; a finding of some names these processes."""
    ranks: dict[Finding, list[int]] = {}
    processes = gather([asdict(finding) for finding in findings])
    for rank, rows in enumerate(processes):
        for row in rows:
            ranks.setdefault(Finding(**row), []).append(rank)
    return [
        finding
        if len(reporters) == len(processes)
        else Finding(finding.verdict, f"{finding.name} of process {_few(reporters)}", finding.text)
        for finding, reporters in ranks.items()
    ]


def _few(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:8])) + (", ..." if values[8:] else "")


def versions() -> Finding:
    """Compare the versions of JAX, jaxlib and the CUDA plugin; the first three numbers, as 0.12.0.1 fits 0.12.0."""
    installed = {}
    for name in ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin"):
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    words = [f"{name} {version}" for name, version in installed.items()]
    words += [f"Python {platform.python_version()}"]
    words += [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name[:5] == "NCCL_"]
    if len({tuple(version.split(".")[:3]) for version in installed.values()}) > 1:
        fix = f"they differ; pip install jax[cuda12]=={installed['jax']} brings all of one version"
        return Finding("FAIL", "versions", f"{', '.join(words)}: {fix}")
    return Finding("OK", "versions", ", ".join(words))


def devices(launch: Launch | None, dist: DistConfig) -> Finding:
    """Check the devices of the job as a start does, and that it found the GPU of this host."""
    kinds = Counter(device.device_kind for device in jax.devices())
    text = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    try:
        check_devices(launch, dist)
    except UserError as error:
        return Finding("FAIL", "devices", str(error))
    on_cpu = jax.devices()[0].platform == "cpu"
    if on_cpu and Path("/dev/nvidia0").exists() and not os.environ.get("JAX_PLATFORMS"):
        fix = "pip install jax[cuda12] (or cuda13); JAX_PLATFORMS=cpu says that the CPU is meant"
        return Finding("FAIL", "devices", f"{text}, and this host has a GPU; {fix}")
    if len(kinds) > 1:
        return Finding("WARN", "devices", f"{text}: a step takes as long as on the slowest")
    return Finding("OK", "devices", text)


def hosts(launch: Launch | None) -> Finding:
    """List the processes by host."""
    processes = gather([socket.gethostname(), jax.local_device_count()])
    counts = Counter(host for host, _ in processes)
    listed = _few([f"{host} ({count})" for host, count in counts.items()])
    method = "alone" if launch is None else f"joined by {launch.method}"
    local = sorted({count for _, count in processes})
    amounts = f"{units.counted(len(processes), 'process', 'processes')} on {units.counted(len(counts), 'host')}"
    text = f"{amounts}, {method}: {listed}; devices of each: {_few(local)}"
    if len(local) > 1 or len(set(counts.values())) > 1:
        fix = "give every host the same processes and every process the same devices"
        return Finding("WARN", "hosts", f"{text}; {fix}")
    return Finding("OK", "hosts", text)


def run_dir(cfg: Config, mesh: Mesh) -> list[Finding]:
    """Write and sync a file where the run directory will be, and look for room for checkpoints."""
    name, folder = "run directory", Path(cfg.log.run_dir)
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    try:
        check_run_dir(cfg)
    except UserError as error:
        return [Finding("FAIL", name, f"{folder}: {error}")]
    if (problem := Probe(existing)()) is not None:
        fix = "make it writable, mount it, or choose another --log.run-dir"
        return [Finding("FAIL", name, f"{folder}: {problem}; {fix}")]
    leaves = jax.tree.leaves(abstract_state(cfg, mesh))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    free, keep = shutil.disk_usage(existing).free, cfg.checkpoint.keep + 1
    room = f"a checkpoint has {units.size(size)}, and {keep} are there at times"
    fix = "make room, or choose another --log.run-dir, or a smaller --checkpoint.keep"
    enough = free >= keep * size
    verdict = "OK" if enough else "WARN" if free >= size else "FAIL"
    room += "; there is room" if enough else f", but {units.size(free)} are free; {fix}"
    return [Finding("OK", name, f"{folder} can be written"), Finding(verdict, "disk space", room)]


def links(mesh: Mesh) -> list[Finding]:
    """Time an all-reduce along each axis of several devices, and compare it with the time that `plan` predicts."""
    with jax.set_mesh(mesh):
        return [_link(mesh, axis) for axis, ranks in mesh.shape.items() if ranks > 1]


def _link(mesh: Mesh, axis: str) -> Finding:
    ranks, device = mesh.shape[axis], mesh.devices.flat[0]
    count = SIZE[device.platform] // 4 // ranks * ranks
    over_all = NamedSharding(mesh, P(AXES))
    x = jax.jit(lambda: jnp.ones(count * mesh.size, jnp.float32, out_sharding=over_all))()
    other_axes = tuple(name for name in AXES if name != axis)
    run = jax.jit(smap(lambda x: jax.lax.psum(x, axis), in_specs=P(AXES), out_specs=P(other_axes)))
    jax.block_until_ready([run(x) for _ in range(2)])
    begun = time.perf_counter()
    jax.block_until_ready([run(x) for _ in range(TIMES)])
    seconds, planned = max(gather((time.perf_counter() - begun) / TIMES)), None
    if (gpu := gpu_of_kind(device.device_kind)) is not None:
        cluster = find_cluster(None, gpu, mesh.size)
        planned = collective_seconds(cluster, "all-reduce", 4 * count, _group(mesh, axis, cluster))
    # NCCL's bus bandwidth: the bytes that each link must carry, over the time.
    moved = 2 * 4 * count * (ranks - 1) / ranks
    return judge(f"all-reduce over {axis}={ranks}", moved, seconds, planned)


def judge(name: str, moved: float, seconds: float, planned: float | None) -> Finding:
    """Compare the `seconds` of a collective that moves `moved` bytes over a link with the `planned` ones, if known."""
    text = f"{moved / seconds / 1e9:.2f} GB/s"
    if planned is None:
        return Finding("NOTE", name, f"{text}; not judged on this device")
    share = planned / seconds
    text += f", {share:.0%} of the planned {moved / planned / 1e9:.1f}"
    if share >= GOOD:
        return Finding("OK", name, text)
    fix = "see which link NCCL takes (NCCL_DEBUG=INFO), nvidia-smi nvlink -s and topo -m, and NCCL_IB_HCA"
    return Finding("WARN" if share >= BAD else "FAIL", name, f"{text}; {fix}")


def _group(mesh: Mesh, axis: str, cluster: Cluster) -> Group:
    """Return the first group of the axis; devices of a process are on one node, and processes of a host too."""
    devices = mesh.devices[tuple(slice(None) if name == axis else 0 for name in mesh.axis_names)]
    hosts, domain = gather(socket.gethostname()), cluster.gpus_per_node
    # Above 8 GPUs NVLink spans hosts: nodes are counted in its domains.
    nodes = Counter(x.id // domain if domain > 8 else hosts[x.process_index] for x in devices)
    return Group(ranks=len(devices), per_node=max(nodes.values()))
