"""Llama 3.2 1B, meant for 1 to 64 GPUs of 80 GB.

A batch of 64 sequences. Recomputation and micro-batches are the fastest that fit the GPUs at hand.
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
    model=shapes.LLAMA32_1B,
    mesh=MeshConfig(fsdp=-1),
    data=DataConfig(source="tokens:data/fineweb", tokenizer="data/tokenizer.json", seq_len=8192),
    optim=OptimConfig(lr=5e-4, warmup_steps=1000),
    train=TrainConfig(
        steps=20_000, global_batch=64, microbatches=AUTO, remat="auto", eval_every=500
    ),
    checkpoint=CheckpointConfig(every=500),
    log=LogConfig(run_dir="out/llama32_1b"),
)
