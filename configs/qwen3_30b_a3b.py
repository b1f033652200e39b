"""Qwen3 30B-A3B, meant for 16 to 512 GPUs of 80 GB: the 128 experts of a layer inside each node, sharded across.

4 M tokens a step. Recomputation and micro-batches are the fastest that fit the GPUs at hand. The weight of the
balancing loss is that of its `config.json`.
"""

from dataclasses import replace

from ultrascale_jax.config import LogConfig, MoEConfig, OptimConfig
from ultrascale_jax.configs import mixtral_8x7b, shapes

config = replace(
    mixtral_8x7b.config,
    model=shapes.QWEN3_30B_A3B,
    optim=OptimConfig(lr=3e-4, warmup_steps=2000),
    moe=MoEConfig(aux_loss=(0.001, "batch")),
    log=LogConfig(run_dir="out/qwen3_30b_a3b"),
)
