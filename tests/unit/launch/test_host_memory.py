"""The host's memory that a process may pin, and copies to it that are timed."""

import math

import pytest

from ultrascale_jax.config import HOST_MEMORY_SHARE, UserError
from ultrascale_jax.launch import host_memory, procfs
from ultrascale_jax.launch.procfs import Memory

GIB = 2**30


def machine(root, **files):
    """Write a machine of 2 GiB whose processes are in the control groups of `files`."""
    contents = {"proc/meminfo": "MemFree: 1 kB\nMemTotal:        2097152 kB\n"}
    for path, text in (contents | files).items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {}, math.inf),
        ("0::/slurm/job\n", {"sys/fs/cgroup/slurm/job/memory.max": "max\n"}, math.inf),
        ("0::/slurm/job\n", {"sys/fs/cgroup/slurm/memory.max": "1073741824\n"}, GIB),
        ("0::/not/here\n", {"sys/fs/cgroup/memory.max": "536870912\n"}, GIB / 2),
        (
            "3:cpu,memory:/docker/x\n1:cpuset:/docker/x\n",
            {"sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "1073741824\n"},
            GIB,
        ),
    ],
)
def test_the_memory_is_the_machines_and_that_of_the_control_groups(tmp_path, groups, files, limit):
    root = machine(tmp_path, **{"proc/self/cgroup": groups}, **files)
    assert procfs.memory(root) == Memory(2 * GIB, limit)
    # Without /proc nothing is known.
    assert procfs.memory(tmp_path / "none") == Memory(0, math.inf)


def test_processes_share_the_host_by_their_gpus():
    dgx, share = Memory(2048 * GIB, math.inf), HOST_MEMORY_SHARE
    assert host_memory.process_bytes(dgx, 8, 8, 8) == share * 2048 * GIB
    assert host_memory.process_bytes(dgx, 8, 8, 1) == share * 256 * GIB
    # A container with two of the GPUs and 100 GiB.
    assert host_memory.process_bytes(Memory(2048 * GIB, 100 * GIB), 8, 2, 1) == share * 50 * GIB


@pytest.mark.parametrize(
    ("limit", "num_gpus", "gib"),
    [("192", 1, 190), ("1536", 8, 128), ("0", 8, 0), ("2", 1, 0), (None, 1, 62)],
)
def test_several_gpus_of_a_process_take_regions_of_powers_of_two(limit, num_gpus, gib):
    environ = {} if limit is None else {host_memory.LIMIT: limit}
    assert host_memory.gpu_bytes(environ, num_gpus) == gib * GIB


def test_a_limit_that_is_no_number_is_refused_and_a_machine_without_gpus_sets_none():
    with pytest.raises(UserError, match=r"^XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB='all': must be a"):
        host_memory.gpu_bytes({host_memory.LIMIT: "all"}, 1)
    environ = {}
    host_memory.set_limit(environ, None)
    assert environ == {}
