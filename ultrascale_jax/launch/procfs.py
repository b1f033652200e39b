"""Read Linux's /proc: memory and NVIDIA GPUs."""

import contextlib
import math
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Memory:
    """Bytes of memory."""

    total: float
    """Memory of the machine; 0 without /proc."""
    limit: float
    """Limit of the tightest control group of this process; infinite without one."""


def memory(root: Path = Path("/")) -> Memory:
    """Return the memory of the machine at `root`, and the limit of this process's control groups (cgroup v1 or v2)."""
    total, limit, text = 0.0, math.inf, ""
    with contextlib.suppress(OSError):
        text = (root / "proc/meminfo").read_text()
    if match := re.search(r"^MemTotal:\s*(\d+) kB", text, re.MULTILINE):
        total = 1024.0 * int(match[1])
    text = ""
    with contextlib.suppress(OSError):
        text = (root / "proc/self/cgroup").read_text()
    for _, kinds, path in re.findall(r"^(\d+):(.*?):/(.*)$", text, re.MULTILINE):
        top, name = root / "sys/fs/cgroup", "memory.max"
        if kinds:
            top, name = top / "memory", "memory.limit_in_bytes"
        if kinds and "memory" not in kinds.split(","):
            continue
        group = top / path
        # In a container the path may be the host's, and the files of its own group at the top.
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):
                limit = min(limit, int((folder / name).read_text()))
            if folder == top:
                break
    return Memory(total, limit)


def gpu_kinds(folder: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the name of each NVIDIA GPU of the machine, JAX's `device_kind`, and leave the GPU alone."""
    kinds = []
    for path in sorted(folder.glob("*/information")):
        with contextlib.suppress(OSError):
            kinds += re.findall(r"^Model:\s*(.*\S)", path.read_text(errors="replace"), re.MULTILINE)
    return kinds
