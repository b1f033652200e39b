"""Two processes hold their parts of the one global batch, and read no more rows than they need."""

from tests.processes import in_two_processes
from ultrascale_jax.config import DataConfig
from ultrascale_jax.data.loader import Loader

PROGRAM = """
import numpy as np
from ultrascale_jax.config import ContextConfig, DataConfig, MeshConfig
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.sharding.mesh import make_mesh

class Counted:
    def __init__(self, sample):
        self.sample, self.reads = sample, set()
    def __call__(self, i):
        self.reads.add(i % 8)
        return self.sample(i)

data = DataConfig(source="synthetic", seq_len=16, document_mask=False)
# With cp=4 each process has a part of every row.
for mesh, rows in ((MeshConfig(), 4), (MeshConfig(cp=2), 4), (MeshConfig(fsdp=1, cp=4), 8)):
    loader = Loader(data, vocab_size=99, global_batch=8, seed=4, cp=mesh.cp, context=ContextConfig())
    counted = loader._sample = Counted(loader._sample)
    step, batch, digest = next(loader.device_batches(make_mesh(mesh), 5))
    assert len(counted.reads) == rows, counted.reads
    for name, value in loader.batch(5).items():
        for shard in batch[name].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])
    print("hash", digest()(), flush=True)
"""


def test_two_processes_hold_their_parts_of_the_one_global_batch():
    data = DataConfig(source="synthetic", seq_len=16, document_mask=False)
    expected = Loader(data, vocab_size=99, global_batch=8, seed=4).batch_hash(5)
    for done in in_two_processes(PROGRAM, devices=2):
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"hash {expected}\n") == 3
