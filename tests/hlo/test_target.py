"""GPUs that exist for the compiler only."""

import os
import subprocess
import sys

import jax
import pytest

from ultrascale_jax.plan.compile import TARGETS, target_checks, target_devices

WITHOUT_PLUGIN = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("jax_plugins.", "jax_cuda")):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from ultrascale_jax.plan.compile import target_devices
target_devices(8)
"""


@pytest.mark.parametrize(("num_devices", "hosts"), [(2, 1), (8, 1), (64, 8), (4096, 512)])
def test_targets_are_as_many_as_asked_for(num_devices, hosts):
    devices = target_devices(num_devices)
    assert len(devices) == num_devices
    assert {device.device_kind for device in devices} == {"NVIDIA H100 80GB HBM3"}
    assert len({device.process_index for device in devices}) == hosts


@pytest.mark.parametrize("num_devices", [0, 12, -8])
def test_half_a_host_is_refused(num_devices):
    with pytest.raises(ValueError, match=rf"num_devices={num_devices}.*multiple of 8"):
        target_devices(num_devices)


def test_an_unknown_gpu_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"gpu='tpu'.*h100"):
        target_devices(8, "tpu")


def test_a_missing_plugin_names_the_extra():
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_PLUGIN],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert "ultrascale_jax[aot]" in run.stderr.splitlines()[-1]


def test_attention_asks_the_target_and_afterwards_this_machine_again():
    from jax._src.cudnn import fused_attention_stablehlo as attention

    own = attention.check_compute_capability
    with target_checks(TARGETS["h100"]):
        assert attention.check_compute_capability("9.0")
        assert not attention.check_compute_capability("10.0")
        assert attention.check_cudnn_version() == 91000
    assert attention.check_compute_capability is own


def test_the_processors_that_run_the_tests_stay():
    target_devices(8)
    assert {device.platform for device in jax.devices()} == {"cpu"}
