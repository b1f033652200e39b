"""How a process finds out from its environment and its command line that it is one of many."""

import pytest

from ultrascale_jax.config import DistConfig, UserError
from ultrascale_jax.launch.cluster import detect, own_gpus

ADDRESS = "JAX_COORDINATOR_ADDRESS"
SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "node[007-008,012],other3",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}


def test_a_process_on_its_own_is_left_alone():
    assert detect({"HOME": "/root"}) is None
    assert detect({"JAX_NUM_PROCESSES": "1"}) is None
    assert detect({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None


def test_a_plain_environment_names_address_count_and_number():
    launch = detect(
        {"JAX_COORDINATOR_ADDRESS": "h0:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
    )
    assert launch is not None
    assert (launch.address, launch.num_processes, launch.process_id) == ("h0:1234", 4, 2)
    assert launch.local_device_ids is None


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "JAX_COORDINATOR_ADDRESS"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "h0:1"}, "JAX_PROCESS_ID"),
        (
            {"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "h0:1", "JAX_PROCESS_ID": "2"},
            "JAX_PROCESS_ID",
        ),
        ({**OMPI}, "JAX_COORDINATOR_ADDRESS"),
        ({"JAX_NUM_PROCESSES": "four"}, "JAX_NUM_PROCESSES"),
        (
            {"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "h0", "JAX_PROCESS_ID": "0"},
            ADDRESS,
        ),
        ({"JAX_COORDINATOR_ADDRESS": "h0:1"}, "JAX_COORDINATOR_ADDRESS"),
        ({"JAX_PROCESS_ID": "1"}, "JAX_PROCESS_ID"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h0"}, "MASTER_PORT"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE"),
    ],
)
def test_an_incomplete_environment_is_refused_by_the_missing_name(environ, name):
    with pytest.raises(UserError, match=f"^{name}="):
        detect(environ)


@pytest.mark.parametrize(
    ("dist", "name"),
    [
        (DistConfig(address="h0:1"), "dist.address"),
        (DistConfig(address="h0", num_processes=2, process_id=0), "dist.address"),
        (DistConfig(address="h0:1", num_processes=2), "JAX_PROCESS_ID"),
    ],
)
def test_what_the_command_line_says_is_named_as_it_stands_there(dist, name):
    with pytest.raises(UserError, match=f"^{name}="):
        detect({}, dist)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node[007-008,012],other3", "node007"),
        ("n1", "n1"),
        ("gpu-a,gpu-b", "gpu-a"),
        ("r[3,7]", "r3"),
    ],
)
def test_slurm_process_0_is_on_the_first_node(nodes, host):
    launch = detect({**SLURM, "SLURM_STEP_NODELIST": nodes})
    assert launch is not None
    assert launch.address == f"{host}:{61440 + 70001 % 4096}"
    assert (launch.num_processes, launch.process_id) == (16, 9)


@pytest.mark.parametrize(
    ("extra", "devices", "expected"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, (1,), 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x16)", "SLURM_LOCALID": "0"}, None, 8),
        ({"SLURM_NTASKS_PER_NODE": "1", "SLURM_LOCALID": "0"}, None, 8),
        # --gpus-per-task=1: SLURM shows each task its own.
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "CUDA_VISIBLE_DEVICES": "5"}, None, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x4)", "CUDA_VISIBLE_DEVICES": "0,1"}, None, 2),
        # A container that got one GPU knows it as 0.
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "NVIDIA_VISIBLE_DEVICES": "1"}, None, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "NVIDIA_VISIBLE_DEVICES": "all"}, (1,), 1),
        # All eight to all tasks of the node.
        (
            {"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
            (1,),
            1,
        ),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "2(x8)", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
            (4, 5, 6, 7),
            4,
        ),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "8,1(x8)", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"},
            None,
            8,
        ),
    ],
)
def test_a_slurm_task_takes_all_gpus_when_alone_and_its_share_when_not(extra, devices, expected):
    launch = detect({**SLURM, "SLURM_GPUS_ON_NODE": "8", **extra})
    assert launch is not None
    assert (launch.local_device_ids, launch.expected_gpus) == (devices, expected)


def test_more_processes_than_gpus_on_a_node_are_refused():
    with pytest.raises(UserError, match=r"^CUDA_VISIBLE_DEVICES='0,1,2': 8 processes"):
        own_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 1, 8)


def test_an_interactive_slurm_shell_is_a_process_on_its_own():
    assert detect({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_a_job_of_slurm_without_srun_is_refused():
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    with pytest.raises(UserError, match=r"^SLURM_NTASKS='16': start it with srun"):
        detect(batch)
    assert detect({**batch, "JAX_NUM_PROCESSES": "1"}) is None
    assert detect({**batch, "SLURM_NTASKS": "1"}) is None


OMPI_4 = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
OMPI_5 = {"PMIX_NAMESPACE": "prterun-gpu-a.site-4242@1"}


@pytest.mark.parametrize(
    ("extra", "address"),
    [
        (OMPI_4, f"10.96.0.1:{61440 + 1531576320 // 4096 % 4096}"),
        ({"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::1,fe80::2]:34911"}, "[fe80::1]:61441"),
        (OMPI_5, f"gpu-a.site:{61440 + 4242 % 4096}"),
        (OMPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "16"}, f"127.0.0.1:{61440 + 4242 % 4096}"),
        (OMPI_5 | {"JAX_COORDINATOR_ADDRESS": "h0:99"}, "h0:99"),
    ],
)
def test_open_mpi_tells_where_its_launcher_is(extra, address):
    launch = detect({**OMPI, **extra})
    assert launch is not None
    assert launch.address == address
    assert (launch.method, launch.num_processes, launch.process_id) == ("ompi", 16, 3)
    assert launch.local_device_ids == (3,)


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h0",
    "MASTER_PORT": "29500",
}


def test_torchruns_variables_are_read_and_its_own_port_is_left_to_it():
    launch = detect(TORCHRUN)
    assert launch is not None
    assert (launch.address, launch.num_processes, launch.process_id) == ("h0:29500", 4, 3)
    assert launch.local_device_ids == (1,)
    served = detect(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert served is not None
    assert served.address == "h0:29501"
    assert detect(TORCHRUN | {"WORLD_SIZE": "1"}) is None


def test_the_command_line_beats_jax_variables_and_those_beat_the_launcher():
    every = SLURM | TORCHRUN | {"JAX_COORDINATOR_ADDRESS": "h1:1", "JAX_PROCESS_ID": "1"}
    found = detect(every)
    assert found is not None
    assert (found.method, found.address, found.process_id) == ("torchrun", "h1:1", 3)
    found = detect(every | {"JAX_NUM_PROCESSES": "2"})
    assert found is not None
    assert (found.method, found.address, found.process_id) == ("environment", "h1:1", 1)
    assert found.local_device_ids is None
    dist = DistConfig(address="h2:2", num_processes=8, process_id=7)
    found = detect(every | {"JAX_NUM_PROCESSES": "2"}, dist)
    assert found is not None
    assert (found.method, found.address, found.process_id) == ("command line", "h2:2", 7)
    found = detect(SLURM, DistConfig(address="ib0-node007:5000"))
    assert found is not None
    assert (found.method, found.address, found.process_id) == ("slurm", "ib0-node007:5000", 9)


def test_an_indexed_kubernetes_job_is_left_to_jax_unless_its_size_is_given():
    indexed = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    launch = detect(indexed)
    assert launch is not None
    assert (launch.method, launch.address) == ("kubernetes", None)
    given = {"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "job-0.svc"}
    plain = detect({**indexed, **given, "JAX_COORDINATOR_PORT": "55527"})
    assert plain is not None
    assert (plain.method, plain.process_id) == ("environment", 1)
    assert plain.address == "job-0.svc:55527"


THE_THREE = "JAX_NUM_PROCESSES, JAX_PROCESS_ID and JAX_COORDINATOR_ADDRESS"
STEP = {**SLURM, "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}
LAUNCHERS = [
    {"PMI_RANK": "1", "PMI_SIZE": "4"},
    {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
    {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "4"},
    {"MVP_COMM_WORLD_RANK": "1", "MVP_COMM_WORLD_SIZE": "4"},
    {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "4"},
    {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4"},
    {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4"},
    {"PROCESS_ID": "1", "NUM_PROCESSES": "4"},
    {"NODE_RANK": "1", "NNODES": "4"},
    {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "4"},
    {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "4"},
    {"VC_TASK_INDEX": "1", "VC_WORKER_NUM": "4"},
    {"NODE_RANK": "1", "AZUREML_NODE_COUNT": "4"},
    {"AWS_BATCH_JOB_NODE_INDEX": "1", "AWS_BATCH_JOB_NUM_NODES": "4"},
]


@pytest.mark.parametrize("environ", LAUNCHERS, ids=lambda environ: next(iter(environ)))
def test_a_launcher_that_tells_no_address_is_refused_or_joined_at_the_one_that_is_given(environ):
    for rank in "0123":
        mine = {name: rank if value == "1" else value for name, value in environ.items()}
        with pytest.raises(UserError, match="set JAX_COORDINATOR_ADDRESS=host:port") as refused:
            detect(mine)
        assert THE_THREE in str(refused.value)
        assert f"{list(environ)[1]}=4" in str(refused.value)
        assert "JAX_NUM_PROCESSES=1 to train alone" in str(refused.value)
        assert detect({**mine, "JAX_NUM_PROCESSES": "1"}) is None
    launch = detect({**environ, "JAX_COORDINATOR_ADDRESS": "h0:99"})
    assert launch is not None
    assert (launch.address, launch.num_processes, launch.process_id) == ("h0:99", 4, 1)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "1", "MASTER_ADDR": "h"},
        {"RANK": "0", "MASTER_ADDR": "h"},
        {"PMI_RANK": "0"},
        # prterun, aprun and HPE's mpiexec tell a process its rank alone.
        {"PMIX_RANK": "0"},
        {"ALPS_APP_PE": "0"},
        {"PALS_RANKID": "3"},
        {"PMI_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "1"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2"},
        {"SLURM_JOB_ID": "1", "SLURM_NPROCS": "4"},
        {"SLURM_JOBID": "1", "SLURM_NTASKS": "4"},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "3"},
        {name: value for name, value in SLURM.items() if name != "SLURM_LOCALID"},
        {name: value for name, value in SLURM.items() if name != "SLURM_JOB_ID"},
        # One that says "alone" contradicts what its step, or its allocation, says.
        {**STEP, "RANK": "0", "WORLD_SIZE": "1"},
        {**STEP, **OMPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "RANK": "0", "WORLD_SIZE": "1"},
        {
            "KUBERNETES_SERVICE_HOST": "h",
            "JOB_COMPLETION_INDEX": "0",
            "RANK": "0",
            "WORLD_SIZE": "1",
        },
    ],
)
def test_half_a_launch_or_two_that_contradict_each_other_is_refused_with_what_settles_it(environ):
    with pytest.raises(UserError) as refused:
        detect(environ)
    assert THE_THREE in str(refused.value)
    assert detect({**environ, "JAX_NUM_PROCESSES": "1"}) is None


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_PROCID": "0"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"NNODES": "4"},
        {"WORLD_SIZE": "1"},
    ],
)
def test_a_launch_of_one_process_is_alone(environ):
    assert detect(environ) is None


def test_the_inner_launcher_wins_over_the_outer():
    shell = {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    for outer in (shell, STEP):
        launch = detect({**outer, **OMPI, **OMPI_5})
        assert launch is not None
        assert (launch.method, launch.num_processes, launch.process_id) == ("ompi", 16, 3)
        launch = detect({**outer, **TORCHRUN})
        assert launch is not None
        assert (launch.method, launch.num_processes, launch.process_id) == ("torchrun", 4, 3)
        with pytest.raises(UserError, match="PMI_SIZE=2"):
            detect({**outer, "PMI_RANK": "1", "PMI_SIZE": "2"})


def test_srun_that_speaks_pmi_is_still_srun():
    launch = detect({**STEP, "PMI_RANK": "1", "PMI_SIZE": "4"})
    assert launch is not None
    assert (launch.method, launch.num_processes, launch.process_id) == ("slurm", 4, 1)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**OMPI, **OMPI_5, "OMPI_COMM_WORLD_RANK": "16"}, "OMPI_COMM_WORLD_RANK='16': must be be"),
        (
            {**OMPI, **OMPI_5, "OMPI_COMM_WORLD_LOCAL_RANK": "8"},
            "OMPI_COMM_WORLD_LOCAL_RANK='8': must",
        ),
        ({**SLURM, "SLURM_PROCID": "16"}, "SLURM_PROCID='16': must be below SLURM_NTASKS=16"),
        ({**TORCHRUN, "LOCAL_RANK": "5"}, "LOCAL_RANK='5': must be below LOCAL_WORLD_SIZE=2"),
        ({"PMI_RANK": "4", "PMI_SIZE": "4"}, "PMI_RANK='4': must be below PMI_SIZE=4"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT='99999': must be"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT='http': must be"),
        ({**TORCHRUN, "MASTER_PORT": "9" * 5000}, "MASTER_PORT='999"),
        (
            {**TORCHRUN, "MASTER_PORT": "65535", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            "MASTER_PORT='65535': must be",
        ),
        ({**TORCHRUN, "MASTER_ADDR": "a..b"}, "MASTER_ADDR='a..b': is no host name"),
        ({**TORCHRUN, "MASTER_ADDR": "a b"}, "MASTER_ADDR='a b': is no host name"),
        ({**TORCHRUN, "MASTER_ADDR": "x" * 64}, "MASTER_ADDR='xxx"),
        ({**TORCHRUN, "MASTER_ADDR": "300.1.1.1"}, "MASTER_ADDR='300.1.1.1': is no host name"),
        ({**TORCHRUN, "MASTER_ADDR": "[h0]"}, r"MASTER_ADDR='\[h0\]': is no host name"),
        ({**TORCHRUN, ADDRESS: "a..b:9"}, f"{ADDRESS}='a..b:9': is no host name"),
        ({**TORCHRUN, ADDRESS: "h0:65536"}, f"{ADDRESS}='h0:65536': set it to host:port"),
        (
            {**TORCHRUN, "JAX_COORDINATOR_BIND_ADDRESS": "0.0.0.0:x"},
            "JAX_COORDINATOR_BIND_ADDRESS='0.0.0.0:x': must be",
        ),
        (
            {**TORCHRUN, "JAX_COORDINATOR_BIND_ADDRESS": "a..b"},
            "JAX_COORDINATOR_BIND_ADDRESS='a..b': is no host name",
        ),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_GPUS_ON_NODE": "4"},
            "SLURM_GPUS_ON_NODE='4': 8 processes",
        ),
    ],
)
def test_a_rank_port_or_host_that_cannot_be_is_refused_by_its_name(environ, words):
    with pytest.raises(UserError, match=f"^{words}"):
        detect(environ)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("::1", "[::1]:29500"),
        ("[fe80::1]", "[fe80::1]:29500"),
        ("10.0.0.1", "10.0.0.1:29500"),
        ("gpu_3.rack-2.site.", "gpu_3.rack-2.site.:29500"),
        ("bücher.example", "bücher.example:29500"),
    ],
)
def test_the_host_of_torchrun_may_be_a_name_or_an_address_of_either_kind(host, address):
    launch = detect({**TORCHRUN, "MASTER_ADDR": host})
    assert launch is not None
    assert launch.address == address


@pytest.mark.parametrize(
    ("bind", "address"),
    [
        ("0.0.0.0", "0.0.0.0:29500"),
        ("::", "[::]:29500"),
        ("[::]", "[::]:29500"),
        ("[::]:7", "[::]:7"),
        ("ib0-h0:7", "ib0-h0:7"),
    ],
)
def test_a_bind_address_without_a_port_takes_the_coordinators(bind, address):
    launch = detect({**TORCHRUN, "JAX_COORDINATOR_BIND_ADDRESS": bind})
    assert launch is not None
    assert launch.bind_address == address


def test_processes_on_the_cpu_share_no_gpus():
    many = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_GPUS_ON_NODE": "4"}
    launch = detect({**many, "JAX_PLATFORMS": "cpu"})
    assert launch is not None
    assert launch.local_device_ids is None
