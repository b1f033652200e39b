"""How a process finds its place in a job, from its launcher's environment and its command line."""

import pytest

from ultrascale_jax.config import DistConfig, UserError
from ultrascale_jax.launch.cluster import LAUNCHERS, Launch, detect, own_gpus

ADDRESS = "JAX_COORDINATOR_ADDRESS"
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
JAX = {ADDRESS: "h0:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "node[007-008,012],other3",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}
EIGHT_A_NODE = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}
STEP = SLURM | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}
SHELL = SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}
OMPI_4 = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
OMPI_5 = {"PMIX_NAMESPACE": "prterun-gpu-a.site-4242@1"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h0",
    "MASTER_PORT": "29500",
}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
SETTLE = "JAX_NUM_PROCESSES, JAX_PROCESS_ID and JAX_COORDINATOR_ADDRESS"


def joined(environ, dist=None) -> Launch:
    launch = detect(environ, dist)
    assert launch is not None
    return launch


def place(environ, dist=None):
    launch = joined(environ, dist)
    return launch.method, launch.address, launch.num_processes, launch.process_id


@pytest.mark.parametrize(
    "environ",
    [
        {"HOME": "/root"},
        {"JAX_NUM_PROCESSES": "1"},
        {"SLURM_JOB_ID": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_PROCID": "0"},
        SHELL,
        {"PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_launch_of_one_process_is_alone(environ):
    assert detect(environ) is None


COMMAND_LINE = DistConfig(address="h2:2", num_processes=8, process_id=7)
EVERY = SLURM | TORCHRUN | {ADDRESS: "h1:1", "JAX_PROCESS_ID": "1"}


@pytest.mark.parametrize(
    ("environ", "dist", "expected"),
    [
        (JAX, None, ("environment", "h0:1234", 4, 2)),
        (TORCHRUN, None, ("torchrun", "h0:29500", 4, 3)),
        # The port of the agent's store is its own.
        (
            TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
            None,
            ("torchrun", "h0:29501", 4, 3),
        ),
        # srun that speaks PMI is still srun.
        (STEP | {"PMI_RANK": "1", "PMI_SIZE": "4"}, None, ("slurm", "node007:61809", 4, 1)),
        # The inner launcher wins over the outer, and the command line over all.
        (STEP | OMPI | OMPI_5, None, ("ompi", "gpu-a.site:61586", 16, 3)),
        (SHELL | TORCHRUN, None, ("torchrun", "h0:29500", 4, 3)),
        (EVERY, None, ("torchrun", "h1:1", 4, 3)),
        (EVERY | {"JAX_NUM_PROCESSES": "2"}, None, ("environment", "h1:1", 2, 1)),
        (EVERY | {"JAX_NUM_PROCESSES": "2"}, COMMAND_LINE, ("command line", "h2:2", 8, 7)),
        (SLURM, DistConfig(address="ib0-node007:5000"), ("slurm", "ib0-node007:5000", 16, 9)),
        # JAX asks an indexed Kubernetes job's API, unless the size is given.
        (KUBERNETES, None, ("kubernetes", None, None, None)),
        (
            KUBERNETES
            | {"JAX_NUM_PROCESSES": "2", ADDRESS: "job-0.svc", "JAX_COORDINATOR_PORT": "55527"},
            None,
            ("environment", "job-0.svc:55527", 2, 1),
        ),
    ],
)
def test_the_command_line_beats_jax_variables_and_those_beat_the_inner_launcher(
    environ, dist, expected
):
    assert place(environ, dist) == expected


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        (SLURM, f"node007:{61440 + 70001 % 4096}"),
        (OMPI | OMPI_4, f"10.96.0.1:{61440 + 1531576320 // 4096 % 4096}"),
        (
            OMPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::1,fe80::2]:34911"},
            "[fe80::1]:61441",
        ),
        (OMPI | OMPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "16"}, "127.0.0.1:61586"),
        (TORCHRUN | {"MASTER_ADDR": "::1"}, "[::1]:29500"),
        (TORCHRUN | {"MASTER_ADDR": "10.0.0.1"}, "10.0.0.1:29500"),
    ],
)
def test_process_0_is_at_the_address_that_the_launcher_tells(environ, address):
    assert joined(environ).address == address


def test_a_bind_address_without_a_port_takes_the_coordinators():
    for bind, address in (("::", "[::]:29500"), ("ib0-h0:7", "ib0-h0:7")):
        assert joined(TORCHRUN | {BIND: bind}).bind_address == address


ALL_8 = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


@pytest.mark.parametrize(
    ("environ", "devices", "expected"),
    [
        (EIGHT_A_NODE, (1,), 1),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x16)", "SLURM_LOCALID": "0"}, None, 8),
        (SLURM | {"SLURM_NTASKS_PER_NODE": "1", "SLURM_LOCALID": "0"}, None, 8),
        # --gpus-per-task=1: SLURM shows each task its own.
        (EIGHT_A_NODE | {"CUDA_VISIBLE_DEVICES": "5"}, None, 1),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x4)", "CUDA_VISIBLE_DEVICES": "0,1"},
            None,
            2,
        ),
        # A container that got one GPU knows it as 0.
        (EIGHT_A_NODE | {"NVIDIA_VISIBLE_DEVICES": "1"}, None, 1),
        (EIGHT_A_NODE | {"NVIDIA_VISIBLE_DEVICES": "all"}, (1,), 1),
        (EIGHT_A_NODE | ALL_8, (1,), 1),
        (SLURM | ALL_8 | {"SLURM_STEP_TASKS_PER_NODE": "2(x8)"}, (4, 5, 6, 7), 4),
        (
            SLURM
            | {"SLURM_STEP_TASKS_PER_NODE": "8,1(x8)", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"},
            None,
            8,
        ),
    ],
)
def test_a_slurm_task_takes_all_gpus_when_alone_and_its_share_when_not(environ, devices, expected):
    launch = joined(environ | {"SLURM_GPUS_ON_NODE": "8"})
    assert (launch.local_device_ids, launch.expected_gpus) == (devices, expected)


def test_other_launchers_tell_the_gpu_by_the_local_rank_and_cpus_are_not_shared():
    assert joined(JAX).local_device_ids is None
    assert joined(OMPI | OMPI_5).local_device_ids == (3,)
    assert joined(TORCHRUN).local_device_ids == (1,)
    assert joined(TORCHRUN).several_hosts and not joined(JAX).several_hosts
    on_cpus = EIGHT_A_NODE | {"SLURM_GPUS_ON_NODE": "4", "JAX_PLATFORMS": "cpu"}
    assert joined(on_cpus).local_device_ids is None
    with pytest.raises(UserError, match=r"^CUDA_VISIBLE_DEVICES='0,1,2': 8 processes"):
        own_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 1, 8)


@pytest.mark.parametrize("launcher", [one for one in LAUNCHERS if one.method != "slurm"])
def test_a_launcher_that_tells_no_address_is_refused_or_joined_at_the_one_that_is_given(launcher):
    for rank in "01":
        environ = {launcher.rank: rank, launcher.size: "4"}
        if launcher.method == "torchrun":
            environ["MASTER_PORT"] = "1"
        with pytest.raises(UserError) as refused:
            detect(environ)
        if launcher.method != "torchrun":
            for words in (SETTLE, f"{launcher.size}=4", f"set {ADDRESS}=host:port"):
                assert words in str(refused.value)
        assert detect(environ | {"JAX_NUM_PROCESSES": "1"}) is None
    assert place(environ | {ADDRESS: "h0:99"})[1:] == ("h0:99", 4, 1)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "MASTER_ADDR": "h"},
        # prterun tells a process its rank alone.
        {"PMIX_RANK": "0"},
        {"PMI_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2"},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "3"},
        {name: value for name, value in SLURM.items() if name != "SLURM_LOCALID"},
        # One that says "alone" contradicts its step, or its allocation.
        STEP | {"RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_half_a_launch_or_two_that_contradict_each_other_is_refused_with_the_fix(environ):
    with pytest.raises(UserError, match=SETTLE):
        detect(environ)
    assert detect({**environ, "JAX_NUM_PROCESSES": "1"}) is None


TWO = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0", ADDRESS: "h0:1"}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"JAX_NUM_PROCESSES": "four"}, "JAX_NUM_PROCESSES="),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, f"{ADDRESS}="),
        (TWO | {"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID='2'"),
        (OMPI, f"{ADDRESS}="),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR="),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE="),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16"}, "SLURM_NTASKS='16': start it with srun"),
        (SLURM | {"SLURM_PROCID": "16"}, "SLURM_PROCID='16': must be below SLURM_NTASKS=16"),
        (OMPI | OMPI_5 | {"OMPI_COMM_WORLD_LOCAL_RANK": "8"}, "OMPI_COMM_WORLD_LOCAL_RANK='8'"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT='99999': must be"),
        (TORCHRUN | {"MASTER_ADDR": "a..b"}, "MASTER_ADDR='a..b': is no host name"),
        (TORCHRUN | {ADDRESS: "h0:65536"}, f"{ADDRESS}='h0:65536': set it to host:port"),
        (
            EIGHT_A_NODE | {"SLURM_GPUS_ON_NODE": "4"},
            "SLURM_GPUS_ON_NODE='4': 8 processes",
        ),
    ],
)
def test_a_variable_that_is_missing_or_cannot_be_is_refused_by_its_name(environ, words):
    with pytest.raises(UserError, match=f"^{words}"):
        detect(environ)


def test_an_option_is_named_as_it_stands_on_the_command_line():
    for dist in (DistConfig(address="h0:1"), DistConfig(address="h0", num_processes=2)):
        with pytest.raises(UserError, match=r"^(dist\.address|JAX_PROCESS_ID)="):
            detect({}, dist)
