"""A recipe of a second: what the jobs of this folder train."""

import os

from tests import collective_order
from ultrascale_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)

if "JAX_NUM_PROCESSES" in os.environ:
    # One of several, over gloo: none of its programs may leave the order of its collectives open.
    collective_order.check_programs()

MODEL = ModelConfig(
    vocab_size=64, d_model=32, d_ff=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8
)
"""Also of tests to which only the run around it matters."""

config = Config(
    model=MODEL,
    mesh=MeshConfig(fsdp=-1),
    data=DataConfig(source="synthetic", seq_len=32),
    train=TrainConfig(steps=12, global_batch=8, precision="fp32", eval_batches=1),
    optim=OptimConfig(lr=1e-2, warmup_steps=2),
    checkpoint=CheckpointConfig(every=4),
    log=LogConfig(run_dir="out/tiny"),
)
