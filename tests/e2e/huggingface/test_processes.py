"""Two processes of four devices each: neither reads more than its part, and together they write one checkpoint."""

import json

import numpy as np
from safetensors.numpy import load_file

from tests.hf_layout import assert_same_tensors, changed, stored
from tests.paths import HF
from tests.processes import in_two_processes

FOLDER = HF / "llama3"
PROGRAM = """
import json
from ultrascale_jax.config import Config, MeshConfig
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.huggingface import checkpoint as hf
from ultrascale_jax.train_step.state import abstract_state

source, target = sys.argv[3:]
taken, read_one = [], hf._read_one

def counting(*arguments):
    value = read_one(*arguments)
    taken.append(value.nbytes)
    return value

hf._read_one = counting
model = hf.read_config(source)
cfg = Config(model=model, mesh=MeshConfig(fsdp=2, tp=4)).check(jax.device_count())
params = hf.load(source, abstract_state(cfg, make_mesh(cfg.mesh)).params)
hf.save(params, model, target, dtype="float32", max_shard_bytes=100_000)
print(json.dumps({"taken": sum(taken), "largest": max(taken)}))
"""


def test_a_weight_that_is_not_finite_for_one_process_is_refused_by_all(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(FOLDER / "model.safetensors")[name]
    weight[0, -1] = np.nan  # in the last part of D
    folder = changed("llama3", tmp_path / "hf", {name: weight})
    for done in in_two_processes(PROGRAM, folder, tmp_path / "out", devices=4):
        assert done.returncode == 1
        assert f"UserError: {name}=nan: a weight must be" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_process_reads_only_its_devices_part_and_the_first_one_writes_the_whole(tmp_path):
    sizes = {name: value.nbytes for name, value in load_file(FOLDER / "model.safetensors").items()}
    vectors = sum(size for name, size in sizes.items() if "norm" in name)
    for done in in_two_processes(PROGRAM, FOLDER, tmp_path / "out", devices=4):
        assert done.returncode == 0, done.stderr
        reads = json.loads(done.stdout.splitlines()[-1])
        # Norm scales are whole on every device, matrices have their D split between the processes.
        assert reads["taken"] == (sum(sizes.values()) - vectors) // 2 + vectors
        assert reads["largest"] <= max(sizes.values()) // 8
    assert_same_tensors(stored(tmp_path / "out"), stored(FOLDER))
