"""How a process finds the others, and what happens to XLA_FLAGS."""

import os
import socket
import subprocess
import sys

import pytest

from ultrascale_jax.config import GPU_MEMORY_SHARE
from ultrascale_jax.distributed import CPU_FLAGS, GPU_FLAGS, detect, set_environment

SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "node[007-008,012],other3",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
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
    ],
)
def test_an_incomplete_environment_is_refused_by_the_missing_name(environ, name):
    with pytest.raises(ValueError, match=f"^{name}="):
        detect(environ)


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
    ("extra", "devices"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, (1,)),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x16)"}, None),
        ({"SLURM_NTASKS_PER_NODE": "1"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "CUDA_VISIBLE_DEVICES": "5"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (1,)),
    ],
)
def test_a_slurm_task_takes_all_gpus_when_alone_and_one_when_not(extra, devices):
    launch = detect({**SLURM, **extra})
    assert launch is not None
    assert launch.local_device_ids == devices


def test_an_interactive_slurm_shell_is_a_process_on_its_own():
    assert detect({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_open_mpi_4_tells_where_its_launcher_is():
    launch = detect(
        {**OMPI, "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
    )
    assert launch is not None
    assert launch.address == f"10.96.0.1:{61440 + 1531576320 // 4096 % 4096}"
    assert (launch.num_processes, launch.process_id, launch.local_device_ids) == (8, 3, (3,))


def test_an_indexed_kubernetes_job_is_left_to_jax_unless_its_size_is_given():
    indexed = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    launch = detect(indexed)
    assert launch is not None
    assert (launch.method, launch.address) == ("kubernetes", None)
    plain = detect({**indexed, "JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "job-0.svc:1"})
    assert plain is not None
    assert (plain.method, plain.process_id) == ("environment", 1)


def test_flags_are_added_but_never_override_the_users():
    environ = {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false"}
    set_environment(environ)
    assert environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == str(GPU_MEMORY_SHARE)
    words = environ["XLA_FLAGS"].split()
    assert words[0] == "--xla_gpu_enable_latency_hiding_scheduler=false"
    assert len(words) == len(GPU_FLAGS) == len({word.partition("=")[0] for word in words})


def test_a_cpu_gets_its_own_flags_and_no_share_of_memory():
    environ = {"JAX_PLATFORMS": "cpu"}
    set_environment(environ)
    flags = " ".join(f"--{name}={value}" for name, value in CPU_FLAGS.items())
    assert environ == {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


PAIR = """
import jax.experimental.multihost_utils
from ultrascale_jax import distributed
distributed.initialize(timeout_s=60, heartbeat_s=5)
import jax
print("joined", jax.process_index(), jax.process_count(), len(jax.devices()), flush=True)
if jax.process_index() == 1:
    raise RuntimeError("first cause")
jax.experimental.multihost_utils.sync_global_devices("never")
"""


@pytest.mark.slow
def test_two_processes_join_and_an_exception_in_one_ends_both():

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "OMPI"))
        },
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        # A jaxlib that did not know one of the flags would abort here.
        "XLA_FLAGS": " ".join(f"--{name}={value}" for name, value in GPU_FLAGS.items()),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
    }
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", PAIR],
            env={**environ, "JAX_PROCESS_ID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [run.communicate(timeout=120) for run in runs]
    finally:
        for run in runs:
            run.kill()
    for number, (out, err) in enumerate(outputs):
        assert f"waiting for 2 processes at 127.0.0.1:{port} (environment)" in out, err
        assert f"joined {number} 2 2" in out, err
    assert runs[1].returncode == 70
    assert "first cause" in outputs[1][1]
    assert runs[0].returncode != 0
