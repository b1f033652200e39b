"""The environment of a process, and the devices of its job."""

import pytest

from ultrascale_jax.config import GPU_MEMORY_SHARE, DistConfig, UserError
from ultrascale_jax.launch.cluster import Launch
from ultrascale_jax.launch.distributed import (
    CPU_FLAGS,
    GPU_FLAGS,
    check_devices,
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
