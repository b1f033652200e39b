"""Detect a process's place in its job: from `--dist.*`, or from its launcher's environment variables.

The command line comes first, then `JAX_*`, then torchrun's variables, then the cluster's own (SLURM, Open MPI, an
indexed Kubernetes job). An error names a value that is missing or contradicts another.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ultrascale_jax.config import DistConfig, UserError, require

FIRST_PORT, PORTS = 61440, 4096
"""Ports of coordinators, beyond those that Linux hands out itself (32768 to 60999); JAX takes the same ones."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One process's place in a job: address, number of processes, rank."""

    method: str
    """The source of these values: `command line`, `environment`, `torchrun`, `slurm`, `ompi` or `kubernetes`."""
    address: str | None = None
    """`host:port` of process 0; None if JAX asks the cluster."""
    num_processes: int | None = None
    """Number of processes; None if JAX asks the cluster."""
    process_id: int | None = None
    """Number of this process; None if JAX asks the cluster."""
    local_device_ids: tuple[int, ...] | None = None
    """GPUs of this host that the process takes; None for all that it sees."""
    expected_gpus: int | None = None
    """GPUs that the cluster gave this process; None if it does not say."""


def detect(environ: Mapping[str, str], dist: DistConfig | None = None) -> Launch | None:
    """Return the launch of `dist` and `environ`, None for a process on its own; `UserError` names what is wrong."""
    given = _given(environ, dist or DistConfig())
    launch = _plain(environ, given)
    if launch is None:
        launch = _torchrun(environ, given) or _slurm(environ) or _ompi(environ)
        if launch is None and {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environ.keys():
            launch = Launch(method="kubernetes")  # JAX asks the cluster's API, if it may
        if launch is not None and given["address"].value:
            launch = replace(launch, address=_address(environ, given))
        elif launch is None:
            _refuse_leftovers(environ, given)
    if launch is None or launch.num_processes == 1:
        return None
    known = launch.method == "kubernetes" or launch.address is not None
    fix = "set it to host:port of process 0 (mpirun -x JAX_COORDINATOR_ADDRESS=...), or --dist.address"
    require(known, "JAX_COORDINATOR_ADDRESS", "", fix)
    return launch


@dataclass(frozen=True)
class Said:
    """The value of one setting, and its source."""

    value: str | None
    by: str
    """The option or variable that sets it, or would have set it."""


def _given(environ: Mapping[str, str], dist: DistConfig) -> dict[str, Said]:
    explicit = {
        "address": (dist.address, "JAX_COORDINATOR_ADDRESS"),
        "num_processes": (dist.num_processes, "JAX_NUM_PROCESSES"),
        "process_id": (dist.process_id, "JAX_PROCESS_ID"),
    }
    return {
        name: Said(environ.get(variable), variable)
        if value is None
        else Said(str(value), f"dist.{name}")
        for name, (value, variable) in explicit.items()
    }


def _plain(environ: Mapping[str, str], given: Mapping[str, Said]) -> Launch | None:
    """Read a number of processes, an address, and this process's number (or the index in a Kubernetes job)."""
    count, number = given["num_processes"], given["process_id"]
    if count.value is None:
        return None
    source = "command line" if count.by.startswith("dist.") else "environment"
    num_processes = _number({count.by: count.value}, count.by, 1)
    if num_processes == 1:
        return Launch(method=source, num_processes=1)
    text = number.value or environ.get("JOB_COMPLETION_INDEX", "")
    fix = f"set it to this process's number, from 0 to {num_processes - 1}, or --dist.process-id"
    require(text.isdecimal() and int(text) < num_processes, number.by, text, fix)
    return Launch(
        method=source,
        address=_address(environ, given),
        num_processes=num_processes,
        process_id=int(text),
    )


def _address(environ: Mapping[str, str], given: Mapping[str, Said]) -> str:
    text = given["address"].value or ""
    port = environ.get("JAX_COORDINATOR_PORT", "")
    if text and port and re.fullmatch(r"[^:]+|\[.*\]", text):
        text = f"{text}:{port}"
    fix = "set it to host:port of process 0, or --dist.address"
    match = re.fullmatch(r"(?:[^:\s]+|\[[^\]\s]+\]):(\d+)", text)
    usable = match is not None and 0 < int(match[1]) < 65536
    require(usable, given["address"].by, text, fix)
    return text


def _refuse_leftovers(environ: Mapping[str, str], given: Mapping[str, Said]) -> None:
    """Refuse a process that has part of a launch, or that runs beside `srun`: it is no process on its own."""
    for said in (given["address"], given["process_id"]):
        fix = "there is no JAX_NUM_PROCESSES (--dist.num-processes); give it too, or neither"
        require(said.value is None, said.by, said.value, fix)
    size = environ.get("WORLD_SIZE", "1")
    fix = "there is no RANK; set it too, or JAX_NUM_PROCESSES=1 to train alone"
    require(size == "1" or "RANK" in environ, "WORLD_SIZE", size, fix)
    tasks = environ.get("SLURM_NTASKS", environ.get("SLURM_JOB_NUM_NODES", "1"))
    beside = "SLURM_JOB_ID" in environ and "SLURM_STEP_NODELIST" not in environ
    fix = "start it with srun, which makes the tasks of the job; to train alone, set JAX_NUM_PROCESSES=1"
    require(not beside or tasks == "1", "SLURM_NTASKS", tasks, fix)


def _torchrun(environ: Mapping[str, str], given: Mapping[str, Said]) -> Launch | None:
    """Read the variables of torchrun, which other launchers set too (PyTorchJob, Ray, many scripts)."""
    if not {"RANK", "WORLD_SIZE"} <= environ.keys():
        return None
    num_processes = _number(environ, "WORLD_SIZE", 1)
    if num_processes == 1:
        return Launch(method="torchrun", num_processes=1)
    process_id = _number(environ, "RANK")
    fix = f"must be below WORLD_SIZE={num_processes}"
    require(process_id < num_processes, "RANK", process_id, fix)
    address = None
    if not given["address"].value:
        host = environ.get("MASTER_ADDR", "")
        require(bool(host), "MASTER_ADDR", host, "set it to the host of rank 0")
        # torchrun itself listens at MASTER_PORT; the port behind it is free as a rule.
        shift = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
        address = f"{host}:{_number(environ, 'MASTER_PORT', 1) + shift}"
    local_id = _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else None
    per_node = _number(environ, "LOCAL_WORLD_SIZE", 1) if "LOCAL_WORLD_SIZE" in environ else None
    return Launch(
        method="torchrun",
        address=address,
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=None if local_id is None else own_gpus(environ, local_id, per_node),
    )


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    """Read a task of `srun`; the shell of `salloc` or `sbatch` itself has no step, and is no task."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if not all(name in environ for name in names):
        return None
    # SLURM_NTASKS is the allocation's; an interactive `srun --pty` shell is a step of one task in it.
    counted = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    nodes = environ["SLURM_STEP_NODELIST"]
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    require(first is not None, "SLURM_STEP_NODELIST", nodes, "must name a host")
    host = first[1] + (first[2] or "") if first else ""
    per_node = _tasks_here(environ)
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    gpus = int(on_node) if on_node.isdecimal() and int(on_node) > 0 else None
    return Launch(
        method="slurm",
        address=f"{host}:{FIRST_PORT + _number(environ, 'SLURM_JOB_ID') % PORTS}",
        num_processes=_number(environ, counted, 1),
        process_id=_number(environ, "SLURM_PROCID"),
        local_device_ids=own_gpus(environ, _number(environ, "SLURM_LOCALID"), per_node, gpus),
        expected_gpus=None if gpus is None or per_node is None else gpus // per_node,
    )


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """Return the number of tasks on this node, from `8(x2),4` and the node's number; None if SLURM does not say."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_NTASKS_PER_NODE", ""))
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(times or 1)
    node = environ.get("SLURM_NODEID", "0")
    node = int(node) if node.isdecimal() and int(node) < len(tasks) else 0
    return tasks[node] if tasks else None


def _ompi(environ: Mapping[str, str]) -> Launch | None:
    """Read a process of `mpirun`: process 0 is at its launcher's address (Open MPI 4), or in its job name (5)."""
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    num_processes = _number(environ, "OMPI_COMM_WORLD_SIZE", 1)
    per_node = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    four = re.match(
        r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))",
        environ.get("OMPI_MCA_orte_hnp_uri", ""),
    )
    five = re.fullmatch(r"prte\w*-(.+)-(\d+)@\d+", environ.get("PMIX_NAMESPACE", ""))
    address = None
    if four is not None:
        address = f"{four[2] or f'[{four[3]}]'}:{FIRST_PORT + int(four[1]) // 4096 % PORTS}"
    elif five is not None:
        address = f"{five[1]}:{FIRST_PORT + int(five[2]) % PORTS}"
    if address is not None and per_node == num_processes:
        address = f"127.0.0.1:{address.rpartition(':')[2]}"
    local_id = _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
    return Launch(
        method="ompi",
        address=address,
        num_processes=num_processes,
        process_id=_number(environ, "OMPI_COMM_WORLD_RANK"),
        local_device_ids=own_gpus(environ, local_id, per_node),
    )


def own_gpus(
    environ: Mapping[str, str], local_id: int, per_node: int | None, on_node: int | None = None
) -> tuple[int, ...] | None:
    """Return the GPUs of the `local_id`-th of `per_node` processes, counted among those it sees; None for all.

    A process alone on its node takes all. Several that see the same GPUs share them evenly; where each sees only some
    of the `on_node` there are, the launcher has shared them out already. `UserError` for more processes than GPUs.
    """
    names = visible_gpus(environ)
    visible = None if names is None else len(names)
    if per_node == 1 or visible == 1:
        return None
    if visible is None or per_node is None:
        return (local_id,)
    if on_node is not None and visible * per_node <= on_node:
        return None
    fix = f"{per_node} processes on this node see {visible} GPUs; start one process a GPU, or one for all"
    require(visible >= per_node, "CUDA_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"), fix)
    share = visible // per_node
    return tuple(range(local_id * share, (local_id + 1) * share))


def visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Return CUDA's names of the GPUs that it, or the container, shows this process; None if neither says.

    Container runtimes read NVIDIA_VISIBLE_DEVICES and number what is left anew; CUDA_VISIBLE_DEVICES chooses from it.
    """
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        text = environ.get(name, "")
        if text and text not in ("all", "none", "void"):
            names = text.split(",")
            own = name == "CUDA_VISIBLE_DEVICES"
            return names if own else [str(number) for number in range(len(names))]
    return None


def _number(environ: Mapping[str, str], name: str, least: int = 0) -> int:
    text = environ.get(name, "")
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"{name}={text!r}: must be a whole number, at least {least}")
    return int(text)
