"""Qwen3 32B, meant for 32 to 1,024 GPUs of 80 GB: fully sharded, tensor and sequence parallel over pairs.

4 M tokens a step. Recomputation and micro-batches are the fastest that fit the GPUs at hand.
"""

from dataclasses import replace

from ultrascale_jax.config import LogConfig, MeshConfig, OptimConfig
from ultrascale_jax.configs import llama3_8b, shapes

config = replace(
    llama3_8b.config,
    model=shapes.QWEN3_32B,
    mesh=MeshConfig(fsdp=-1, sp=2),
    optim=OptimConfig(lr=2e-4, warmup_steps=2000),
    log=LogConfig(run_dir="out/qwen3_32b"),
)
