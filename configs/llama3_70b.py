"""Llama 3 70B, meant for 64 to 1,024 GPUs of 80 GB: tensor and sequence parallel over pairs of GPUs, sharded across.

4 M tokens a step. Recomputation and micro-batches are the fastest that fit the GPUs at hand. Beyond 512 GPUs replicas
are faster: `--mesh dp=2,fsdp=256,sp=2`, or `--mesh auto`.
"""

from dataclasses import replace

from ultrascale_jax.config import LogConfig, MeshConfig, OptimConfig
from ultrascale_jax.configs import llama3_8b, shapes

config = replace(
    llama3_8b.config,
    model=shapes.LLAMA3_70B,
    mesh=MeshConfig(fsdp=-1, sp=2),
    optim=OptimConfig(lr=1.5e-4, warmup_steps=2000),
    log=LogConfig(run_dir="out/llama3_70b"),
)
