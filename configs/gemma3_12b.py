"""Gemma 3 12B, meant for 8 to 256 GPUs of 80 GB: fully sharded; five of six layers see the last 1,024 tokens alone.

Recomputation and micro-batches are the fastest that fit the GPUs at hand.
"""

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.configs import shapes
from ultrascale_jax.configs.pretraining import pretraining

config = pretraining(
    "gemma3_12b",
    shapes.GEMMA3_12B,
    MeshConfig(fsdp=-1),
    seq_len=8192,
    global_batch=512,
    lr=3e-4,
)
