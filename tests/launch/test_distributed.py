"""How processes join and end together, and what happens to XLA_FLAGS."""

import os
import socket
import subprocess
import sys

import jax
import pytest

from ultrascale_jax.config import GPU_MEMORY_SHARE, DistConfig, UserError
from ultrascale_jax.launch.cluster import Launch
from ultrascale_jax.launch.distributed import (
    CPU_FLAGS,
    GPU_FLAGS,
    check_devices,
    describe_job,
    set_environment,
)


def test_flags_are_added_but_never_override_the_users():
    environ = {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false"}
    set_environment(environ)
    assert environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == str(GPU_MEMORY_SHARE)
    words = environ["XLA_FLAGS"].split()
    assert words[0] == "--xla_gpu_enable_latency_hiding_scheduler=false"
    assert len(words) == len(GPU_FLAGS) == len({word.partition("=")[0] for word in words})


def test_a_cpu_gets_its_own_flags_and_threads_and_no_share_of_memory():
    environ = {"JAX_PLATFORMS": "cpu"}
    set_environment(environ)
    flags = " ".join(f"--{name}={value}" for name, value in CPU_FLAGS.items())
    assert int(environ.pop("NPROC")) >= 64
    assert environ == {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    chosen = {"JAX_PLATFORMS": "cpu", "NPROC": "3"}
    set_environment(chosen)
    assert chosen["NPROC"] == "3"


def test_a_job_with_other_devices_than_expected_is_refused_by_process():
    check_devices(None, DistConfig(expect_devices=jax.device_count()))
    with pytest.raises(
        UserError, match=r"^dist.expect_devices=9: the job has 8 devices \(cpu; proc"
    ):
        check_devices(None, DistConfig(expect_devices=9))


def test_the_first_line_of_a_run_says_how_many_processes_and_devices_it_has():
    assert describe_job(None) == "1 process, 8 devices (cpu)"
    assert describe_job(Launch(method="slurm")) == "1 process (slurm), 8 devices (cpu)"


def test_gpus_that_slurm_gave_and_jax_does_not_see_are_missed(monkeypatch):
    launch = Launch(method="slurm", expected_gpus=8)
    # A run that is to be on the CPU misses none.
    check_devices(launch, DistConfig())
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(
        UserError, match=r"^SLURM_GPUS_ON_NODE='8': process 0 on .* sees 0 of the 8"
    ):
        check_devices(launch, DistConfig())
    check_devices(launch, DistConfig(expect_devices=8))


PAIR = """
import os, threading
from pathlib import Path
from ultrascale_jax.launch import distributed
from ultrascale_jax.config import DistConfig
distributed.initialize(DistConfig(timeout_s=60, heartbeat_s=60))
print("told", distributed.from_process0("a", lambda: [os.environ["JAX_PROCESS_ID"]], 60), flush=True)
import jax
print("joined", jax.process_index(), jax.process_count(), len(jax.devices()), flush=True)
port = int(os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2])
if jax.process_index() == 0:
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                print("listens at", local.rpartition(":")[0], flush=True)
def fail():
    raise RuntimeError("first cause")
if jax.process_index() == 1:
    threading.Thread(target=fail).start()
threading.Event().wait()
"""


OTHER = """
import os, sys, jax
from ultrascale_jax.config import DistConfig
if os.environ["JAX_PROCESS_ID"] == "1":
    jax.__version__ = "0.0.1"
from ultrascale_jax.launch import distributed
distributed.initialize(DistConfig(timeout_s=60, heartbeat_s=60))
"""


@pytest.mark.slow
def test_two_versions_of_jax_are_refused_on_both_hosts():
    (_, first), _ = run_pair(OTHER, codes=[2, 2])
    words = f"has jax 0.0.1 and jaxlib {jax.lib.__version__}, and process 0 jax {jax.__version__}"
    # Rank 0 tells it for all.
    assert words in first.splitlines()[-1]


def run_pair(program: str, codes: list[int], **extra: str) -> list[tuple[str, str]]:
    """Run a program in two processes that join each other, and return stdout and stderr of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launchers = ("SLURM", "OMPI", "RANK", "WORLD_SIZE")
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(launchers)},
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
        **extra,
    }
    environ.pop("no_proxy", None)
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**environ, "JAX_PROCESS_ID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [run.communicate(timeout=100) for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == codes, outputs
    return outputs


@pytest.mark.slow
def test_two_processes_join_past_a_proxy_and_an_exception_in_a_thread_of_one_ends_both():
    """Both main threads wait for ever, as in a collective that hangs; the heartbeat would take a minute."""
    outputs = run_pair(
        PAIR,
        codes=[70, 70],
        # A jaxlib that did not know one of the flags would abort here.
        XLA_FLAGS=" ".join(f"--{name}={value}" for name, value in GPU_FLAGS.items()),
        # Nobody is there.
        http_proxy="http://127.0.0.1:9",
    )
    for number, (out, err) in enumerate(outputs):
        assert out.startswith("waiting for 2 processes at 127.0.0.1:"), err
        assert "(environment); if JAX aborts here, or after 60 s, a process is missing" in out
        assert "note: the way to 127.0.0.1 does not go through http_proxy" in out, err
        assert f"joined {number} 2 2" in out, err
        assert "told ['0']" in out, err
    # The interface of the address alone, not all: 127.0.0.1, or ::ffff:127.0.0.1, in the kernel's numbers.
    [listens] = [line for line in outputs[0][0].splitlines() if line.startswith("listens at")]
    assert listens.endswith("0100007F")
    assert "in fail" in outputs[1][1]
    last = outputs[0][1].splitlines()[-1]
    assert last.startswith("first cause: rank 1 (")
    assert last.endswith("): RuntimeError: first cause")
