"""Start-up of a job of many processes, and the XLA flags that a training run wants.

Nothing here decides what is computed. `initialize` finds out from the environment whether this process is one of many
(a plain environment, SLURM, Open MPI or Kubernetes) and joins them through `jax.distributed`; a process on its own is
left alone. `set_environment` must run before JAX makes its first array, because XLA reads the variables once.
"""

import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import jax
from jax.experimental import multihost_utils

from ultrascale_jax.config import GPU_MEMORY_SHARE, require
from ultrascale_jax.reliability.exit_codes import CRASHED

GPU_FLAGS = {
    # Start collectives early and finish them late, so that they run beside the matrix products.
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    # With one collective in flight (the default) a gather and a scatter that meet make one of them wait in the open.
    "xla_gpu_experimental_parallel_collective_overlap_limit": "2",
    # The scheduler may fill as much memory as the run takes. It counts in hundredths of 80% of the GPU, by default 95;
    # above that it makes collectives synchronous: on an H100 from 61 GiB on.
    "xla_gpu_memory_limit_slop_factor": str(round(100 * GPU_MEMORY_SHARE / 0.8)),
}
"""XLA flags for training on NVIDIA GPUs; a CPU ignores them.

The combine thresholds that older recipes raise to a whole layer are left at XLA's defaults: they merge a layer's
collectives into one that no matrix product hides (seen in the compiled Llama-3-8B step for 8 H100s).
"""

CPU_FLAGS = {
    # With the other scheduler a program that XLA:CPU loads from JAX's compilation cache may pair sends wrongly that are
    # in flight together: it hangs, or its numbers are wrong.
    "xla_cpu_enable_concurrency_optimized_scheduler": "false",
}
"""XLA flags for the CPU."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How one process joins the others."""

    method: str
    """Where it was read from: `environment`, `slurm`, `ompi` or `kubernetes`."""
    address: str | None = None
    """`host:port` of process 0; none: JAX asks the cluster."""
    num_processes: int | None = None
    """How many there are; none: JAX asks the cluster."""
    process_id: int | None = None
    """Which one this is; none: JAX asks the cluster."""
    local_device_ids: tuple[int, ...] | None = None
    """GPUs of this host that the process takes; none: all that it sees."""


def detect(environ: Mapping[str, str]) -> Launch | None:
    """The launch that `environ` describes, or none for a process on its own.

    Raises:
        ValueError: a plain environment is incomplete, or Open MPI does not say where process 0 is.
    """
    launch = _plain(environ) or _slurm(environ) or _ompi(environ)
    if (
        launch is None
        and "KUBERNETES_SERVICE_HOST" in environ
        and "JOB_COMPLETION_INDEX" in environ
    ):
        return Launch(method="kubernetes")
    return launch if launch is not None and launch.num_processes != 1 else None


def initialize(*, timeout_s: int = 300, heartbeat_s: int = 100) -> Launch | None:
    """Join the other processes of the job, if there are any; call it before JAX makes its first array.

    A process that does not appear within `timeout_s` aborts the others, and one that stops answering ends them after
    `heartbeat_s`. An uncaught exception ends its process at once with exit code 70: the interpreter's ordinary exit
    would wait for the others for minutes, and they for it.
    """
    launch = detect(os.environ)
    if launch is None:
        return None
    count = "all" if launch.num_processes is None else launch.num_processes
    place = "the address that Kubernetes gives" if launch.address is None else launch.address
    # jax.distributed aborts the process when a peer is missing, so this line has to come first.
    print(f"waiting for {count} processes at {place} ({launch.method})", flush=True)
    jax.distributed.initialize(
        launch.address,
        launch.num_processes,
        launch.process_id,
        local_device_ids=launch.local_device_ids,
        cluster_detection_method=None if launch.method == "kubernetes" else "deactivate",
        initialization_timeout=timeout_s,
        heartbeat_timeout_seconds=heartbeat_s,
    )
    sys.excepthook = _die
    return launch


def set_environment(environ: MutableMapping[str, str]) -> None:
    """Add the flags of the CPU or the GPU to `XLA_FLAGS`, and a GPU's memory's share, keeping what the user set.

    The CPU is asked for by `JAX_PLATFORMS`.
    """
    cpu = environ.get("JAX_PLATFORMS", "").startswith("cpu")
    text = environ.get("XLA_FLAGS", "")
    present = set(re.findall(r"--(\w+)", text))
    flags = CPU_FLAGS if cpu else GPU_FLAGS
    added = [f"--{name}={value}" for name, value in flags.items() if name not in present]
    environ["XLA_FLAGS"] = " ".join([text, *added]).strip()
    if not cpu:
        environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_MEMORY_SHARE))


class StopRequest:
    """Whether the job was told to stop (SIGTERM), asked once after every step inside its `with` block.

    In a job of many processes JAX itself listens, and `reached` is true on all of them after the same step, whichever
    of them was told. A process on its own listens here; a second signal changes nothing, so a save is not cut short.
    """

    def __enter__(self) -> "StopRequest":
        self._told = threading.Event()
        self._alone = not jax.distributed.is_initialized()
        # Python hands signals to the main thread only; elsewhere the process that embeds the run keeps its own handler.
        self._listens = self._alone and threading.current_thread() is threading.main_thread()
        if self._listens:
            self._before = signal.signal(signal.SIGTERM, lambda number, frame: self._told.set())
        return self

    def __exit__(self, *_) -> None:
        if self._listens:
            signal.signal(signal.SIGTERM, self._before)

    def reached(self, step: int) -> bool:
        """Whether to save after `step` and leave; every process asks after every step."""
        return (
            self._told.is_set()
            if self._alone
            else multihost_utils.reached_preemption_sync_point(step)
        )


def _plain(environ: Mapping[str, str]) -> Launch | None:
    """`JAX_NUM_PROCESSES`, with `JAX_COORDINATOR_ADDRESS` and `JAX_PROCESS_ID` (or a Kubernetes job's index)."""
    if "JAX_NUM_PROCESSES" not in environ:
        return None
    num_processes = int(environ["JAX_NUM_PROCESSES"])
    if num_processes == 1:
        return Launch(method="environment", num_processes=1)
    address = environ.get("JAX_COORDINATOR_ADDRESS", "")
    fix = "set it to host:port of process 0, because JAX_NUM_PROCESSES is set"
    require(re.fullmatch(r".+:\d+", address) is not None, "JAX_COORDINATOR_ADDRESS", address, fix)
    text = environ.get("JAX_PROCESS_ID", environ.get("JOB_COMPLETION_INDEX", ""))
    fix = f"set it to this process's number, from 0 to JAX_NUM_PROCESSES-1={num_processes - 1}"
    require(text.isdecimal() and int(text) < num_processes, "JAX_PROCESS_ID", text, fix)
    return Launch(
        method="environment", address=address, num_processes=num_processes, process_id=int(text)
    )


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    """A task of `srun`; the shell of `salloc` or `sbatch` itself has no step, and is no task."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if not all(name in environ for name in names):
        return None
    # SLURM_NTASKS is the allocation's; an interactive `srun --pty` shell is a step of one task in it.
    num_processes = int(environ.get("SLURM_STEP_NUM_TASKS", environ["SLURM_NTASKS"]))
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", environ["SLURM_STEP_NODELIST"])
    require(
        first is not None, "SLURM_STEP_NODELIST", environ["SLURM_STEP_NODELIST"], "must name a host"
    )
    host = first[1] + (first[2] or "") if first else ""
    port = 61440 + int(environ["SLURM_JOB_ID"]) % 4096
    # One task on a node takes all its GPUs. Several take one each, unless SLURM shows each task only its own.
    per_node = re.match(
        r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_NTASKS_PER_NODE", ""))
    )
    alone = per_node is not None and int(per_node[0]) == 1
    return Launch(
        method="slurm",
        address=environ.get("JAX_COORDINATOR_ADDRESS", f"{host}:{port}"),
        num_processes=num_processes,
        process_id=int(environ["SLURM_PROCID"]),
        local_device_ids=_own_gpu(environ, int(environ["SLURM_LOCALID"]), alone),
    )


def _ompi(environ: Mapping[str, str]) -> Launch | None:
    """A process of `mpirun`. Open MPI 4 tells where the launcher is; Open MPI 5 no longer does."""
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    num_processes = int(environ["OMPI_COMM_WORLD_SIZE"])
    address = environ.get("JAX_COORDINATOR_ADDRESS", "")
    launcher = re.match(
        r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", environ.get("OMPI_MCA_orte_hnp_uri", "")
    )
    if not address and launcher is not None:
        address = f"{launcher[2] or launcher[3]}:{61440 + int(launcher[1]) // 4096 % 4096}"
    fix = "set it to host:port of rank 0 (mpirun -x JAX_COORDINATOR_ADDRESS=...); Open MPI 5 does not tell it"
    require(bool(address) or num_processes == 1, "JAX_COORDINATOR_ADDRESS", address, fix)
    alone = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
    return Launch(
        method="ompi",
        address=address,
        num_processes=num_processes,
        process_id=int(environ["OMPI_COMM_WORLD_RANK"]),
        local_device_ids=_own_gpu(environ, int(environ["OMPI_COMM_WORLD_LOCAL_RANK"]), alone),
    )


def _own_gpu(environ: Mapping[str, str], local_id: int, alone: bool) -> tuple[int, ...] | None:
    """The GPU of the `local_id`-th process of a node; none (all it sees) if it is alone there or sees just one."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    return None if alone or (visible != "" and "," not in visible) else (local_id,)


def _die(kind, error, trace) -> None:
    """Exception hook of a job of many processes: report and leave, without the barrier of an ordinary exit."""
    traceback.print_exception(kind, error, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(getattr(error, "exit_code", CRASHED))
