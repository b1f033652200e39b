"""Llama 3 8B, meant for 8 to 512 GPUs of 80 GB: fully sharded.

The batch of 512 sequences (4 M tokens) divides over 8, 16, ... 512 GPUs. Recomputation and micro-batches are the
fastest that fit the GPUs at hand.
"""

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.configs import shapes
from ultrascale_jax.configs.pretraining import pretraining

config = pretraining(
    "llama3_8b",
    shapes.LLAMA3_8B,
    MeshConfig(fsdp=-1),
    seq_len=8192,
    global_batch=512,
    lr=3e-4,
)
