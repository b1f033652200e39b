"""Llama 3 70B, meant for 64 to 1,024 GPUs of 80 GB: tensor and sequence parallel over pairs of GPUs, sharded across.

4 M tokens a step. Recomputation and micro-batches are the fastest that fit the GPUs at hand. Beyond 512 GPUs replicas
are faster: `--mesh dp=2,fsdp=256,sp=2`, or `--mesh auto`.
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
    model=shapes.LLAMA3_70B,
    mesh=MeshConfig(fsdp=-1, sp=2),
    data=DataConfig(source="tokens:data/fineweb", tokenizer="data/tokenizer.json", seq_len=8192),
    optim=OptimConfig(lr=1.5e-4, warmup_steps=2000),
    train=TrainConfig(
        steps=100_000, global_batch=512, microbatches=AUTO, remat="auto", eval_every=1000
    ),
    checkpoint=CheckpointConfig(every=500),
    log=LogConfig(run_dir="out/llama3_70b"),
)
