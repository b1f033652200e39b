"""Llama 3.1 405B, meant for 512 to 4,096 GPUs of 80 GB: tensor and sequence parallel over pairs, sharded across.

16 M tokens a step; learning rate, warm-up and final rate as in arXiv 2407.21783, section 3.4.
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
    model=shapes.LLAMA3_405B,
    mesh=MeshConfig(fsdp=-1, sp=2),
    data=DataConfig(source="tokens:data/fineweb", tokenizer="data/tokenizer.json", seq_len=8192),
    optim=OptimConfig(lr=8e-5, min_lr_ratio=0.01, warmup_steps=8000),
    train=TrainConfig(
        steps=1_200_000, global_batch=2048, microbatches=AUTO, remat="auto", eval_every=1000
    ),
    checkpoint=CheckpointConfig(every=500),
    log=LogConfig(run_dir="out/llama3_405b"),
)
