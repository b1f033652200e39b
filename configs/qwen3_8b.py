"""Qwen3 8B, meant for 8 to 512 GPUs of 80 GB: fully sharded.

Recomputation and micro-batches are the fastest that fit the GPUs at hand.
"""

from dataclasses import replace

from ultrascale_jax.config import LogConfig
from ultrascale_jax.configs import llama3_8b, shapes

config = replace(llama3_8b.config, model=shapes.QWEN3_8B, log=LogConfig(run_dir="out/qwen3_8b"))
