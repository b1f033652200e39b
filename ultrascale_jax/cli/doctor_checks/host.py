"""Checks of a host and its processes before they compute: versions, environment, devices, clock."""

import os
import platform
import resource
import socket
import time
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from ultrascale_jax.cli.doctor_checks.findings import Finding, judged
from ultrascale_jax.config import DistConfig, UserError
from ultrascale_jax.launch.cluster import Launch
from ultrascale_jax.launch.distributed import PROXIES, check_devices, counted
from ultrascale_jax.launch.multihost import gather
from ultrascale_jax.plan.hardware import GPUS

PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
SKEW_S = 1.0
"""Difference between clocks from which on the times in `events.jsonl` mislead."""

SHM_BYTES = 2**30
"""Least size of /dev/shm for several GPUs: NCCL has tens of MB in it for each pair."""

FILES = 4096
"""Least limit of open files."""


def versions() -> list[Finding]:
    """Check that the versions of JAX, jaxlib and the CUDA plugin fit each other."""
    found = {name: _version(name) for name in ("jax", "jaxlib", *PLUGINS)}
    text = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    text += f", Python {platform.python_version()}"
    plugins = [name for name in PLUGINS if found[name]]
    fix = f"pip install jax[cuda12]=={found['jax']} brings all of one version"
    # The first three numbers: 0.12.0.1 is a second build of 0.12.0.
    if len({tuple(version.split(".")[:3]) for version in found.values() if version}) > 1:
        return [Finding("FAIL", "versions", f"{text}: they differ", fix)]
    if len(plugins) > 1:
        fix = f"pip uninstall one of {' and '.join(plugins)}"
        return [Finding("WARN", "versions", f"{text}: two CUDA plugins", fix)]
    return [Finding("OK", "versions", text)]


def environment(environ: Mapping[str, str], num_processes: int) -> list[Finding]:
    """Check the environment variables that make a run slow, or hang."""
    proxies = sorted(name for name in environ if name.lower() in PROXIES)
    text = f"{', '.join(proxies)} set; gRPC does not use it here" if proxies else "no proxies"
    fix = "Collectives do not know proxies; unset what nothing needs"
    found = [judged(proxies and num_processes > 1, "proxies", text, fix)]
    names = sorted(name for name in environ if name.startswith("NCCL_"))
    nccl = " ".join(f"{name}={environ[name]}" for name in names)
    found.append(Finding("OK", "NCCL", nccl or "no NCCL_ variables: its own choices"))
    if environ.get("NCCL_P2P_DISABLE") == "1" or environ.get("NCCL_IB_DISABLE") == "1":
        fix = "Unset NCCL_P2P_DISABLE and NCCL_IB_DISABLE unless the links are broken"
        found[-1] = Finding("WARN", "NCCL", f"{nccl}: a link is turned off", fix)
    return found


def limits(on_gpus: bool, num_processes: int) -> list[Finding]:
    """Check the limits of shared memory, locked memory and open files on this host."""
    found = []
    if Path("/dev/shm").is_dir():
        room = os.statvfs("/dev/shm")
        size = room.f_frsize * room.f_blocks
        few = on_gpus and num_processes > 1 and size < SHM_BYTES
        fix = "docker run --shm-size=16g, or an emptyDir of medium Memory at /dev/shm"
        text = f"/dev/shm has {size / 2**30:.1f} GiB"
        found.append(judged(few, "shared memory", text, fix))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    free = soft == resource.RLIM_INFINITY
    fix = "ulimit -l unlimited (docker: --ulimit memlock=-1), which InfiniBand needs"
    text = "unlimited" if free else f"{soft / 2**20:.0f} MiB"
    found.append(judged(on_gpus and num_processes > 1 and not free, "locked memory", text, fix))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    text, fix = f"limit {soft}", f"ulimit -n {FILES * 16}"
    found.append(judged(0 <= soft < FILES, "open files", text, fix))
    return found


def devices(launch: Launch | None, dist: DistConfig, environ: Mapping[str, str]) -> list[Finding]:
    """Check the devices of the job against those that it should have."""
    every = jax.devices()
    kinds = Counter(device.device_kind for device in every)
    text = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    found = [Finding("OK", "devices", text)]
    if len(kinds) > 1:
        fix = "A step takes as long as on the slowest; leave the others out"
        found = [Finding("WARN", "devices", f"{text}: they differ", fix)]
    cpu = every[0].platform == "cpu"
    if cpu and Path("/dev/nvidia0").exists() and not environ.get("JAX_PLATFORMS"):
        fix = "pip install jax[cuda12] (or cuda13); JAX_PLATFORMS=cpu says that the CPU is meant"
        found = [Finding("FAIL", "devices", f"{text}, and this host has a GPU", fix)]
    known = cpu or every[0].device_kind in {gpu.kind for gpu in GPUS.values()}
    if not known:
        text = f"{every[0].device_kind} is not in plan/hardware.py"
        found.append(Finding("NOTE", "devices", text))
    try:
        check_devices(launch, dist)
    except UserError as error:
        found = [Finding("FAIL", "devices", str(error))]
    return found


def ranks(launch: Launch | None) -> list[Finding]:
    """List the processes by host."""
    told = gather([socket.gethostname(), len(jax.local_devices())])
    hosts = Counter(host for host, _ in told)
    counts = sorted({count for _, count in told})
    method = "alone" if launch is None else f"joined by {launch.method}"
    names = ", ".join(f"{host} ({count})" for host, count in list(hosts.items())[:8])
    text = (
        f"{counted(len(told), 'process', 'processes')} on {counted(len(hosts), 'host', 'hosts')}, {method}: {names}"
        f"{', ...' if len(hosts) > 8 else ''}; devices of each: {', '.join(map(str, counts))}"
    )
    uneven = len(counts) > 1 or len(set(hosts.values())) > 1
    fix = "Give every host the same processes and every process the same devices"
    return [judged(uneven, "ranks", text, fix)]


def clock() -> list[Finding]:
    """Compare the hosts' clocks, as well as a barrier can."""
    if jax.process_count() == 1:
        return []
    # The second barrier is the quicker: the first one also compiles.
    for name in ("doctor-clock-0", "doctor-clock-1"):
        multihost_utils.sync_global_devices(name)
    times = gather(time.time())
    skew, slow = max(times) - min(times), times.index(min(times))
    text, fix = f"processes are {skew:.3f} s apart", f"Process {slow} is behind; run NTP (chrony)"
    return [judged(skew > SKEW_S, "clocks", text, fix)]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
