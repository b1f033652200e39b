"""Llama 3.1 405B, meant for 512 to 4,096 GPUs of 80 GB: tensor and sequence parallel over pairs, sharded across.

16 M tokens a step; learning rate, warm-up and final rate are those of arXiv 2407.21783, section 3.4.
Recomputation and micro-batches are the fastest that fit the GPUs at hand.
"""

from dataclasses import replace

from ultrascale_jax.config import LogConfig, OptimConfig
from ultrascale_jax.configs import llama3_70b, shapes

config = replace(
    llama3_70b.config,
    model=shapes.LLAMA3_405B,
    optim=OptimConfig(lr=8e-5, min_lr_ratio=0.01, warmup_steps=8000),
    train=replace(llama3_70b.config.train, steps=1_200_000, global_batch=2048),
    log=LogConfig(run_dir="out/llama3_405b"),
)
