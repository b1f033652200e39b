"""Qwen3 32B, meant for 32 to 1,024 GPUs of 80 GB: fully sharded, tensor and sequence parallel over pairs.

4 M tokens a step. Recomputation and micro-batches are the fastest that fit the GPUs at hand.
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
    model=shapes.QWEN3_32B,
    mesh=MeshConfig(fsdp=-1, sp=2),
    data=DataConfig(source="tokens:data/fineweb", tokenizer="data/tokenizer.json", seq_len=8192),
    optim=OptimConfig(lr=2e-4, warmup_steps=2000),
    train=TrainConfig(
        steps=100_000, global_batch=512, microbatches=AUTO, remat="auto", eval_every=1000
    ),
    checkpoint=CheckpointConfig(every=500),
    log=LogConfig(run_dir="out/qwen3_32b"),
)
