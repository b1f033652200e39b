"""Two processes of four devices each read their parts of a batch and of a checkpoint, and together write one."""

import json

from safetensors.numpy import load_file

from tests.hf_layout import assert_same_tensors, stored
from tests.paths import HF
from tests.processes import JOIN, run_pair
from ultrascale_jax.config import DataConfig
from ultrascale_jax.data.loader import Loader

FOLDER = HF / "llama3"
PROGRAM = """
import json, sys
import jax
import numpy as np
from ultrascale_jax.config import Config, ContextConfig, DataConfig, MeshConfig
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.huggingface import checkpoint as hf
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.state import abstract_state

class Counted:
    def __init__(self, sample):
        self.sample, self.reads = sample, set()
    def __call__(self, i):
        self.reads.add(i % 8)
        return self.sample(i)

data = DataConfig(source="synthetic", seq_len=16, document_mask=False)
# With cp=8 each process has a part of every row.
for mesh, rows in ((MeshConfig(), 4), (MeshConfig(cp=2), 4), (MeshConfig(fsdp=1, cp=8), 8)):
    loader = Loader(data, vocab_size=99, global_batch=8, seed=4, cp=mesh.cp, context=ContextConfig())
    counted = loader._sample = Counted(loader._sample)
    step, batch, digest = next(loader.device_batches(make_mesh(mesh), 5))
    assert len(counted.reads) == rows, counted.reads
    for name, value in loader.batch(5).items():
        for shard in batch[name].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])
    print("hash", digest()(), flush=True)

source, target = sys.argv[1:]
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


def test_each_of_two_processes_reads_its_part_and_together_they_hold_and_write_the_whole(tmp_path):
    data = DataConfig(source="synthetic", seq_len=16, document_mask=False)
    expected = Loader(data, vocab_size=99, global_batch=8, seed=4).batch_hash(5)
    sizes = {name: value.nbytes for name, value in load_file(FOLDER / "model.safetensors").items()}
    vectors = sum(size for name, size in sizes.items() if "norm" in name)
    for out, _ in run_pair(JOIN + PROGRAM, FOLDER, tmp_path / "out", devices=4):
        assert out.count(f"hash {expected}\n") == 3
        reads = json.loads(out.splitlines()[-1])
        # Norm scales are whole on every device, matrices have their D split between the processes.
        assert reads["taken"] == (sum(sizes.values()) - vectors) // 2 + vectors
        assert reads["largest"] <= max(sizes.values()) // 8
    assert_same_tensors(stored(tmp_path / "out"), stored(FOLDER))
