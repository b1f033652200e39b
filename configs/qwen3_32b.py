"""Qwen3 32B, meant for 32 to 1,024 GPUs of 80 GB: fully sharded, tensor and sequence parallel over pairs.

4 M tokens a step. Recomputation and micro-batches are the fastest that fit the GPUs at hand.
"""

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.configs import shapes
from ultrascale_jax.configs.pretraining import pretraining

config = pretraining(
    "qwen3_32b",
    shapes.QWEN3_32B,
    MeshConfig(fsdp=-1, sp=2),
    seq_len=8192,
    global_batch=512,
    lr=2e-4,
)
