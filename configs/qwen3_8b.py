"""Qwen3 8B, meant for 8 to 512 GPUs of 80 GB: fully sharded.

Recomputation and micro-batches are the fastest that fit the GPUs at hand.
"""

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.configs import shapes
from ultrascale_jax.configs.pretraining import pretraining

config = pretraining(
    "qwen3_8b",
    shapes.QWEN3_8B,
    MeshConfig(fsdp=-1),
    seq_len=8192,
    global_batch=512,
    lr=3e-4,
)
