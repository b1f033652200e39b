"""Two processes of four devices each: neither reads more than its part, and together they write one checkpoint."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "data" / "hf" / "llama3"

PROCESS = """
import json, sys
import jax

port, process, source, target = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))

from ultrascale_jax.config import Config, MeshConfig
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.huggingface import checkpoint as hf
from ultrascale_jax.train_step.state import abstract_state

taken = []
read_layer = hf._read_one

def counting(*arguments):
    value = read_layer(*arguments)
    taken.append(value.nbytes)
    return value

hf._read_one = counting
model = hf.read_config(source)
cfg = Config(model=model, mesh=MeshConfig(fsdp=2, tp=4)).check(jax.device_count())
params = hf.load(source, abstract_state(cfg, make_mesh(cfg.mesh)).params)
hf.save(params, model, target, dtype="float32", max_shard_bytes=100_000)
print(json.dumps({"taken": sum(taken), "largest": max(taken)}))
"""


def run_processes(source, target):
    """Load `source` and write it to `target` with two processes; return for each its exit code, stdout and stderr."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, port, str(number), str(source), str(target)],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    return [
        (process.returncode, *output) for process, output in zip(processes, outputs, strict=True)
    ]


@pytest.mark.slow
def test_a_weight_that_is_not_finite_for_one_process_is_refused_by_all(tmp_path):
    tensors = load_file(FOLDER / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, -1] = np.nan  # in the last part of D
    shutil.copytree(FOLDER, tmp_path / "hf")
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    for code, _, errors in run_processes(tmp_path / "hf", tmp_path / "out"):
        assert code == 1
        assert "UserError: model.layers.1.mlp.up_proj.weight=nan: a weight must be" in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_process_reads_only_its_devices_part_and_the_first_one_writes_the_whole(tmp_path):
    outputs = run_processes(FOLDER, tmp_path / "out")
    for code, _, errors in outputs:
        assert code == 0, errors
    tensors = load_file(FOLDER / "model.safetensors")
    whole = sum(value.nbytes for value in tensors.values())
    vectors = sum(value.nbytes for value in tensors.values() if value.ndim == 1)
    for _, printed, _ in outputs:
        reads = json.loads(printed.splitlines()[-1])
        # Norm scales are whole on every device, matrices have their D split between the processes.
        assert reads["taken"] == (whole - vectors) // 2 + vectors
        assert reads["largest"] <= max(value.nbytes for value in tensors.values()) // 8
    written = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        written |= load_file(path)
    assert written.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(written[name], value, err_msg=name)
