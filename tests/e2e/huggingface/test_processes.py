"""Two processes of four devices each: neither reads more than its part, and together they write one checkpoint."""

import json

from safetensors.numpy import load_file

from tests.hf_layout import assert_same_tensors, stored
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
