"""GPUs that exist for the compiler only."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import UserError
from ultrascale_jax.hlo import deviceless
from ultrascale_jax.hlo.deviceless import target_checks
from ultrascale_jax.plan.compiled.compile import (
    compile_program,
    simulate_step,
    target_devices,
)
from ultrascale_jax.plan.hardware import GPUS, find_cluster

WITHOUT_PLUGIN = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("jax_plugins.", "jax_cuda")):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from ultrascale_jax.plan.compiled.compile import target_devices
target_devices(8)
"""


@pytest.mark.parametrize(
    ("num_devices", "gpu", "message"),
    [
        (12, "h100", r"num_devices=12.*multiple of 8"),
        (0, "h100", r"num_devices=0.*at least 1"),
        (8, "tpu", r"gpu='tpu'.*h100"),
        (1, "48,768,155", r"gpu='48,768,155': XLA compiles only for a GPU that it"),
        (8, "h100.txtpb", r"h100.txtpb': XLA does not read the file"),
    ],
)
def test_a_target_that_cannot_be_is_refused(num_devices, gpu, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("h100.txtpb").write_text(GPUS["h100"].target + "no_such_field: 1\n")
    with pytest.raises(UserError, match=message):
        target_devices(num_devices, gpu)


@pytest.mark.parametrize(
    ("num_devices", "gpu", "gpus_per_host", "hosts"),
    [
        (2, "h100", None, 1),
        (64, "h100", None, 8),
        (4096, "h100", None, 512),
        (12, "h100", 4, 3),
        (72, "gb200", None, 18),
    ],
)
def test_targets_are_as_many_as_asked_for(num_devices, gpu, gpus_per_host, hosts):
    devices = target_devices(num_devices, gpu, gpus_per_host)
    assert len(devices) == num_devices
    assert len({device.process_index for device in devices}) == hosts


@pytest.mark.parametrize("name", GPUS)
def test_xla_reads_the_description_of_every_gpu(name):
    (device,) = target_devices(1, name)
    assert device.device_kind == GPUS[name].kind


@pytest.mark.parametrize("gpu", ["a100", "b200"])
def test_a_program_is_compiled_for_the_gpu_of_its_devices(gpu):
    mesh = jax.sharding.Mesh(np.array(target_devices(2, gpu)), ("x",))
    rows = NamedSharding(mesh, P("x"))
    x = jax.ShapeDtypeStruct((512, 256), "bfloat16", sharding=rows)
    w = jax.ShapeDtypeStruct((256, 256), "bfloat16", sharding=NamedSharding(mesh, P()))
    program = compile_program(jax.jit(lambda x, w: (x @ w).sum(0)), x, w, mesh=mesh)
    assert program.gpu is GPUS[gpu]
    assert simulate_step(program, find_cluster(None, gpu, 2)).step_s > 0


def test_a_missing_plugin_names_the_extra():
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_PLUGIN],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith(
        "ultrascale_jax.config.base.UserError: gpu='h100': "
    )
    assert "ultrascale_jax[aot]" in run.stderr.splitlines()[-1]


def test_a_missing_assembler_names_the_extra_whose_wheel_is_enough(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(deviceless, "TOOLKITS", ())
    assert deviceless.has_assembler()
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    with pytest.raises(
        UserError, match=r"gpu='h100': .*ptxas: pip install 'ultrascale_jax\[aot\]'"
    ):
        target_devices(8)


def test_attention_asks_the_target_and_afterwards_this_machine_again():
    from jax._src.cudnn import fused_attention_stablehlo as attention

    own = attention.check_compute_capability
    with target_checks((9, 0), 91000):
        assert attention.check_compute_capability("9.0")
        assert not attention.check_compute_capability("10.0")
        assert attention.check_cudnn_version() == 91000
    assert attention.check_compute_capability is own
