"""Detect a process's place in its job: from `--dist.*`, or from its launcher's environment variables.

The command line comes first, then `JAX_*`, then `LAUNCHERS` from the inner to the outer, then an indexed Kubernetes
job. A launch of several processes is joined, or refused with the variables that settle it: no process trains alone
because a variable is missing or contradicts another.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ultrascale_jax.config import DistConfig, UserError, require

FIRST_PORT, PORTS = 61440, 4096
"""Ports of coordinators, outside Linux's ephemeral range (32768 to 60999); JAX takes the same ones."""

SETTLE = (
    "set JAX_NUM_PROCESSES, JAX_PROCESS_ID and JAX_COORDINATOR_ADDRESS, or JAX_NUM_PROCESSES=1 to "
    "train alone"
)
"""How the user settles a launch that is incomplete or contradicts itself."""

MOST = 2**32 - 1
"""Greatest number that a variable may hold: SLURM's numbers of jobs have 32 bits."""

BIND = "JAX_COORDINATOR_BIND_ADDRESS"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One process's place in a job: address, number of processes, rank."""

    method: str
    """The source of these values: `command line`, `environment`, `kubernetes` or the `method` of a `Launcher`."""
    address: str | None = None
    """`host:port` of process 0; None if JAX asks the cluster."""
    bind_address: str | None = None
    """`host:port` at which process 0 listens; None for the interface of `address`."""
    num_processes: int | None = None
    """Number of processes; None if JAX asks the cluster."""
    process_id: int | None = None
    """Number of this process; None if JAX asks the cluster."""
    local_device_ids: tuple[int, ...] | None = None
    """GPUs of this host that the process takes; None for all that it sees."""
    several_hosts: bool = False
    """Whether the launcher says that the job has processes on other hosts too."""
    expected_gpus: int | None = None
    """GPUs that the cluster gave this process; None if it does not say."""


@dataclass(frozen=True)
class Launcher:
    """The variables by which a launcher tells a process its place."""

    method: str
    size: str
    rank: str
    local_rank: str = ""
    local_size: str = ""
    optional: bool = False
    """Whether people set one of the variables for themselves, so that one without the other says nothing."""


def _prefixed(method: str, prefix: str) -> Launcher:
    """Return the launcher whose four variables begin with `prefix`."""
    local_rank, local_size = f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE"
    return Launcher(method, f"{prefix}_SIZE", f"{prefix}_RANK", local_rank, local_size)


SLURM = Launcher("slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")
LAUNCHERS = (
    # torchrun's variables, which other launchers set too (PyTorchJob, Ray, many scripts).
    Launcher("torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _prefixed("ompi", "OMPI_COMM_WORLD"),
    _prefixed("mvapich", "MV2_COMM_WORLD"),
    _prefixed("mvapich", "MVP_COMM_WORLD"),
    _prefixed("horovod", "HOROVOD"),
    _prefixed("jsrun", "JSM_NAMESPACE"),
    Launcher("flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
    # MPICH, Intel MPI and all that start processes by Hydra; also `srun --mpi=pmi2`.
    Launcher("pmi", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    SLURM,
    # Operators and clouds start one process a node, or leave the start of more to `ultrascale launch`.
    Launcher("jaxjob", "NUM_PROCESSES", "PROCESS_ID", optional=True),
    Launcher("nodes", "NNODES", "NODE_RANK", optional=True),
    Launcher("azureml", "AZUREML_NODE_COUNT", "NODE_RANK", optional=True),
    Launcher("volcano", "VC_WORKER_NUM", "VC_TASK_INDEX", optional=True),
    Launcher("skypilot", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"),
    Launcher("leaderworkerset", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"),
    Launcher("aws batch", "AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX"),
)
"""Known launchers; an inner one, which another one's process may have started, precedes the outer ones."""

RANKS = ("PMIX_RANK", "ALPS_APP_PE", "PALS_RANKID")
"""Ranks that `prterun`, `aprun` and HPE's `mpiexec` tell without a number of processes."""

SLURM_SIZES = (
    # SLURM_NTASKS is the allocation's; an interactive `srun --pty` shell is a step of one task in it.
    *("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    *("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
)
"""Variables of SLURM that tell how many processes or nodes there are; the first that is set counts."""

STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")
"""Variables of every task of `srun`; the shell of `salloc` or `sbatch` itself has no step, and is no task."""


def detect(environ: Mapping[str, str], dist: DistConfig | None = None) -> Launch | None:
    """Return the launch of `dist` and `environ`, None for a process on its own; `UserError` names the fault."""
    explicit = _explicit(environ, dist or DistConfig())
    launch = _plain(environ, explicit) or _launched(environ, explicit["address"])
    if launch is None:
        for setting in (explicit["address"], explicit["process_id"]):
            fix = "there is no JAX_NUM_PROCESSES (--dist.num-processes); give it too, or neither"
            require(setting.value is None, setting.source, setting.value, fix)
    if launch is None or launch.num_processes == 1:
        return None
    if explicit["address"].value:
        launch = replace(launch, address=_given_address(environ, explicit["address"]))
    return replace(launch, bind_address=_bind_address(environ, launch.address))


@dataclass(frozen=True)
class Setting:
    """The value of one setting, and its source."""

    value: str | None
    source: str
    """The option or variable that sets it, or would have set it."""


def _explicit(environ: Mapping[str, str], dist: DistConfig) -> dict[str, Setting]:
    values = {
        "address": (dist.address, "JAX_COORDINATOR_ADDRESS"),
        "num_processes": (dist.num_processes, "JAX_NUM_PROCESSES"),
        "process_id": (dist.process_id, "JAX_PROCESS_ID"),
    }
    return {
        name: Setting(environ.get(variable), variable)
        if value is None
        else Setting(str(value), f"dist.{name}")
        for name, (value, variable) in values.items()
    }


def _plain(environ: Mapping[str, str], explicit: Mapping[str, Setting]) -> Launch | None:
    """Read a number of processes, an address, and this process's number (or the index in a Kubernetes job)."""
    count, number = explicit["num_processes"], explicit["process_id"]
    if count.value is None:
        return None
    source = "command line" if count.source.startswith("dist.") else "environment"
    num_processes = _number({count.source: count.value}, count.source, 1)
    if num_processes == 1:
        return Launch(method=source, num_processes=1)
    text = number.value or environ.get("JOB_COMPLETION_INDEX", "")
    fix = f"set it to this process's number, from 0 to {num_processes - 1}, or --dist.process-id"
    require(_is_number(text) and int(text) < num_processes, number.source, text, fix)
    return Launch(
        method=source,
        address=_given_address(environ, explicit["address"]),
        num_processes=num_processes,
        process_id=int(text),
    )


def _launched(environ: Mapping[str, str], address: Setting) -> Launch | None:
    """Return the launch of the innermost launcher that tells of several processes; None if none does."""
    complete = [launcher for launcher in LAUNCHERS if _is_complete(environ, launcher)]
    several = [launcher for launcher in complete if _size(environ, launcher) > 1]
    indexed = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environ.keys()
    if not several:
        _refuse_incomplete(environ, complete)
    if complete and complete[0] not in several and (several or indexed):
        # The innermost one says "alone", and it may be left over.
        name = _size_name(environ, complete[0])
        outer = _size_text(environ, several[0]) if several else "the indexed Kubernetes job"
        require(False, name, environ[name], f"contradicts {outer}; {SETTLE}")
    if not several:
        # JAX asks the cluster's API, if it may.
        return Launch(method="kubernetes") if indexed else None
    launcher = several[0]
    if launcher.method == "pmi" and SLURM in several and _is_same(environ, launcher, SLURM):
        launcher = SLURM
    launch = _joined(environ, launcher, address)
    fix = (
        f"{_size_text(environ, launcher)} processes were started, and nothing tells the address of process 0: "
        "set JAX_COORDINATOR_ADDRESS=host:port (mpirun -x, mpiexec -genv), or --dist.address. To replace what the "
        f"launcher says, {SETTLE}"
    )
    has_address = launch.address is not None or bool(address.value)
    require(has_address, "JAX_COORDINATOR_ADDRESS", "", fix)
    return launch


def _is_complete(environ: Mapping[str, str], launcher: Launcher) -> bool:
    """Return whether `environ` has enough variables to find the process's place."""
    names = STEP if launcher is SLURM else (launcher.rank,)
    return bool(_size_name(environ, launcher)) and environ.keys() >= set(names)


def _size_name(environ: Mapping[str, str], launcher: Launcher) -> str:
    """Return the variable that tells the number of processes; empty if there is none."""
    names = SLURM_SIZES[:3] if launcher is SLURM else (launcher.size,)
    return next((name for name in names if name in environ), "")


def _size(environ: Mapping[str, str], launcher: Launcher) -> int:
    return _number(environ, _size_name(environ, launcher), 1)


def _size_text(environ: Mapping[str, str], launcher: Launcher) -> str:
    return f"{_size_name(environ, launcher)}={_size(environ, launcher)}"


def _is_same(environ: Mapping[str, str], one: Launcher, other: Launcher) -> bool:
    """Return whether two launchers give the process one place: `srun` tells MPI's interface its own numbers."""
    same_size = _size(environ, one) == _size(environ, other)
    return same_size and _rank(environ, one) == _rank(environ, other)


def _refuse_incomplete(environ: Mapping[str, str], complete: list[Launcher]) -> None:
    """Refuse a process that has part of a launch of several, or of a SLURM job without `srun`: it may not be alone."""
    rank = next((name for name in RANKS if name in environ and not complete), None)
    fix = f"nothing tells how many processes there are; {SETTLE}"
    require(rank is None, rank or "", environ.get(rank or ""), fix)
    for launcher in LAUNCHERS:
        if launcher in complete or launcher.optional:
            continue
        sizes = SLURM_SIZES if launcher is SLURM else (launcher.size,)
        size = next((name for name in sizes if name in environ), "")
        if size:
            missing = [name for name in STEP if name not in environ]
            fix = f"there is no {launcher.rank}; set it too, or {SETTLE}"
            if launcher is SLURM:
                fix = f"start it with srun, which makes the tasks of the job (there is no {', '.join(missing)})"
                fix = f"{fix}; or {SETTLE}"
            require(environ[size] == "1", size, environ[size], fix)
        # The shell of `sbatch` has the rank 0.
        elif environ.get(launcher.rank, "0") != "0" or (
            launcher is not SLURM and launcher.rank in environ
        ):
            fix = f"there is no {sizes[0]}; set it too, or {SETTLE}"
            require(False, launcher.rank, environ[launcher.rank], fix)


def _joined(environ: Mapping[str, str], launcher: Launcher, address: Setting) -> Launch:
    """Return the process's place in the job of `launcher`; without an address if that gives none."""
    local_id = per_node = gpus = None
    if launcher.local_rank in environ:
        local_id = _number(environ, launcher.local_rank)
    if launcher is SLURM:
        per_node, on_node = _tasks_here(environ), environ.get("SLURM_GPUS_ON_NODE", "")
        gpus = int(on_node) if _is_number(on_node) and int(on_node) > 0 else None
    elif launcher.local_size in environ:
        per_node = _number(environ, launcher.local_size, 1)
    if local_id is not None and per_node is not None:
        fix = f"must be below {launcher.local_size or 'SLURM_STEP_TASKS_PER_NODE'}={per_node}"
        require(local_id < per_node, launcher.local_rank, environ[launcher.local_rank], fix)
    num_processes, process_id = _size(environ, launcher), _rank(environ, launcher)
    find = {"torchrun": _torchrun_address, "slurm": _slurm_address, "ompi": _ompi_address}.get(
        launcher.method
    )
    return Launch(
        method=launcher.method,
        address=None if find is None or address.value else find(environ),
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=None if local_id is None else own_gpus(environ, local_id, per_node, gpus),
        several_hosts=per_node is not None and per_node < num_processes,
        expected_gpus=None if gpus is None or per_node is None else gpus // per_node,
    )


def _rank(environ: Mapping[str, str], launcher: Launcher) -> int:
    rank = _number(environ, launcher.rank)
    fix = f"must be below {_size_text(environ, launcher)}"
    require(rank < _size(environ, launcher), launcher.rank, environ[launcher.rank], fix)
    return rank


def _torchrun_address(environ: Mapping[str, str]) -> str:
    host = environ.get("MASTER_ADDR", "")
    require(bool(host), "MASTER_ADDR", host, "set it to the host of rank 0")
    port = _number(environ, "MASTER_PORT", 1, 65535)
    # torchrun itself listens at MASTER_PORT; the next port is free as a rule.
    if environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
        fix = "must be below 65535: JAX takes the next port too"
        require(port < 65535, "MASTER_PORT", environ["MASTER_PORT"], fix)
        port += 1
    return f"{_host('MASTER_ADDR', host, host)}:{port}"


def _slurm_address(environ: Mapping[str, str]) -> str:
    """Return the first node of the step and a port derived from the job's number."""
    nodes = environ["SLURM_STEP_NODELIST"]
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    require(first is not None, "SLURM_STEP_NODELIST", nodes, "must name a host")
    host = first[1] + (first[2] or "") if first else ""
    return f"{host}:{FIRST_PORT + _number(environ, 'SLURM_JOB_ID') % PORTS}"


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """Return the number of tasks on this node, from `8(x2),4` and the node's number; None if SLURM does not say."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_NTASKS_PER_NODE", ""))
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(times or 1)
    node = environ.get("SLURM_NODEID", "0")
    node = int(node) if node.isdecimal() and int(node) < len(tasks) else 0
    return tasks[node] if tasks else None


def _ompi_address(environ: Mapping[str, str]) -> str | None:
    """Return the address of `mpirun`, from its own (Open MPI 4) or its job's name (5), and a port derived from it."""
    four = re.match(
        r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))",
        environ.get("OMPI_MCA_orte_hnp_uri", ""),
    )
    five = re.fullmatch(r"prte\w*-(.+)-(\d+)@\d+", environ.get("PMIX_NAMESPACE", ""))
    if four is not None:
        host, port = four[2] or f"[{four[3]}]", FIRST_PORT + int(four[1]) // 4096 % PORTS
    elif five is not None:
        host, port = five[1], FIRST_PORT + int(five[2]) % PORTS
    else:
        return None
    if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environ["OMPI_COMM_WORLD_SIZE"]:
        host = "127.0.0.1"
    return f"{host}:{port}"


def _given_address(environ: Mapping[str, str], address: Setting) -> str:
    text, fix = address.value or "", "set it to host:port of process 0, or --dist.address"
    port = "JAX_COORDINATOR_PORT"
    if port in environ:
        _number(environ, port, 1, 65535)
    return _host_and_port(address.source, text, environ.get(port, ""), fix)


def _bind_address(environ: Mapping[str, str], address: str | None) -> str | None:
    """Return where the environment lets process 0 listen; without a port, at that of `address`."""
    text = environ.get(BIND, "")
    port = (address or "").rpartition(":")[2]
    fix = "must be host:port, with a port from 1 to 65535"
    return _host_and_port(BIND, text, port, fix) if text else None


def _host_and_port(name: str, text: str, port: str, fix: str) -> str:
    """Return the `host:port` in `text`, with `port` where it has none. Raises `UserError` about `name`."""
    match = re.fullmatch(r"([^:\[\]\s]+|\[[^\]\s]+\])(?::(.*))?", text)
    host, text_port = (match[1], match[2]) if match else (text, None)
    port = port if text_port is None else text_port
    require(_is_number(port) and 0 < int(port) < 65536, name, text, fix)
    return f"{_host(name, text, host)}:{port}"


def _host(name: str, text: str, host: str) -> str:
    """Return `host` in the form before a port. Raises `UserError` about `name` if no host can have this name."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    fits, is_ipv6 = len(bare) < 254, ":" in bare or bare != host
    try:
        if is_ipv6:
            ipaddress.IPv6Address(bare)
        elif re.fullmatch(r"[\d.]+", bare):
            ipaddress.IPv4Address(bare)
        else:
            labels = bare.removesuffix(".").split(".")
            fits &= all(re.fullmatch(r"\w([\w-]{0,61}\w)?", label) for label in labels)
    except ValueError:
        fits = False
    require(fits, name, text, "is no host name and no IP address")
    return f"[{bare}]" if is_ipv6 else bare


def own_gpus(
    environ: Mapping[str, str], local_id: int, per_node: int | None, on_node: int | None = None
) -> tuple[int, ...] | None:
    """Return the GPUs of the `local_id`-th of `per_node` processes, counted among those it sees; None for all.

    A process alone on its node takes all, and one on the CPU none. Several that see the same GPUs share them evenly;
    where each sees only some of the `on_node` there are, the launcher has shared them out already. `UserError` for more
    processes than GPUs.
    """
    names = visible_gpus(environ)
    visible = None if names is None else len(names)
    if per_node == 1 or visible == 1 or environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return None
    if per_node is None:
        return (local_id,)
    fix = (
        f"{per_node} processes on this node see {{}} GPUs; start one process a GPU, or one for all"
    )
    if visible is None:
        enough = on_node is None or on_node >= per_node
        require(
            enough, "SLURM_GPUS_ON_NODE", environ.get("SLURM_GPUS_ON_NODE"), fix.format(on_node)
        )
        return (local_id,)
    if on_node is not None and visible * per_node <= on_node:
        return None
    seen = environ.get("CUDA_VISIBLE_DEVICES")
    require(visible >= per_node, "CUDA_VISIBLE_DEVICES", seen, fix.format(visible))
    share = visible // per_node
    return tuple(range(local_id * share, (local_id + 1) * share))


def visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Return CUDA's names of the GPUs that it, or the container, shows this process; None if neither says.

    Container runtimes read NVIDIA_VISIBLE_DEVICES and renumber its GPUs; CUDA_VISIBLE_DEVICES chooses among them.
    """
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        text = environ.get(name, "")
        if text and text not in ("all", "none", "void"):
            names = text.split(",")
            is_selection = name == "CUDA_VISIBLE_DEVICES"
            return names if is_selection else [str(number) for number in range(len(names))]
    return None


def _is_number(text: str) -> bool:
    """Return whether `text` is an integer that a port, a rank or a count can have."""
    return text.isdecimal() and len(text) <= 10


def _number(environ: Mapping[str, str], name: str, least: int = 0, most: int = MOST) -> int:
    text = environ.get(name, "")
    fix = f"must be an integer, at least {least}"
    if most < MOST:
        fix = f"must be an integer from {least} to {most}"
    if not _is_number(text) or not least <= int(text) <= most:
        raise UserError(f"{name}={text[:80]!r}: {fix}")
    return int(text)
