"""Llama 3 70B, meant for 64 to 1,024 GPUs of 80 GB: tensor and sequence parallel over pairs of GPUs, sharded across.

4 M tokens a step. Recomputation and micro-batches are the fastest that fit the GPUs at hand. Beyond 512 GPUs replicas
are faster: `--mesh dp=2,fsdp=256,sp=2`, or `--mesh auto`.
"""

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.configs import shapes
from ultrascale_jax.configs.pretraining import pretraining

config = pretraining(
    "llama3_70b",
    shapes.LLAMA3_70B,
    MeshConfig(fsdp=-1, sp=2),
    seq_len=8192,
    global_batch=512,
    lr=1.5e-4,
)
