"""Qwen3 8B, meant for 8 to 512 GPUs of 80 GB: fully sharded.

Recomputation and micro-batches are the fastest that fit the GPUs at hand.
"""

from ultrascale_jax.config import (
    AUTO,
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    MeshConfig,
    OptimConfig,
    TrainConfig,
)
from ultrascale_jax.configs import shapes

config = Config(
    model=shapes.QWEN3_8B,
    mesh=MeshConfig(fsdp=-1),
    data=DataConfig(source="tokens:data/fineweb", tokenizer="data/tokenizer.json", seq_len=8192),
    optim=OptimConfig(lr=3e-4, warmup_steps=2000),
    train=TrainConfig(
        steps=100_000, global_batch=512, microbatches=AUTO, remat="auto", eval_every=1000
    ),
    checkpoint=CheckpointConfig(every=500),
    log=LogConfig(run_dir="out/qwen3_8b"),
)
