"""Llama 3 70B, meant for 64 to 2,048 GPUs of 80 GB: tensor and sequence parallel inside a node, sharded across.

64 GPUs (fsdp 8 x sp 8) want `--train.microbatches 64`, 512 want 8; 4 M tokens a step.
"""

from ultrascale_jax.config import (
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
    mesh=MeshConfig(fsdp=-1, sp=8),
    data=DataConfig(source="tokens:data/fineweb", tokenizer="data/tokenizer.json", seq_len=8192),
    optim=OptimConfig(lr=1.5e-4, warmup_steps=2000),
    train=TrainConfig(steps=100_000, global_batch=512, remat="full", eval_every=1000),
    checkpoint=CheckpointConfig(every=500),
    log=LogConfig(run_dir="out/llama3_70b"),
)
