"""Gemma 3 12B, meant for 8 to 256 GPUs of 80 GB: fully sharded; five of six layers see the last 1,024 tokens alone.

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
    model=shapes.GEMMA3_12B,
    mesh=MeshConfig(fsdp=-1),
    data=DataConfig(source="tokens:data/fineweb", tokenizer="data/tokenizer.json", seq_len=8192),
    optim=OptimConfig(lr=3e-4, warmup_steps=2000),
    train=TrainConfig(
        steps=100_000, global_batch=512, microbatches=AUTO, remat="auto", eval_every=1000
    ),
    checkpoint=CheckpointConfig(every=500),
    log=LogConfig(run_dir="out/gemma3_12b"),
)
