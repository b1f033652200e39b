"""gpt-oss 20B, meant for 16 to 64 GPUs of 80 GB: the 32 experts of a layer inside each node, sharded across.

4 M tokens a step. The width, 2,880, is divisible by 64 and no higher power of two: with more GPUs add `dp`.
Recomputation and micro-batches are the fastest that fit the GPUs at hand. Buffers are for balanced routing; what
exceeds them takes rounds of an eighth.
"""

from ultrascale_jax.config import MeshConfig, MoEConfig
from ultrascale_jax.configs import shapes
from ultrascale_jax.configs.pretraining import pretraining

config = pretraining(
    "gpt_oss_20b",
    shapes.GPT_OSS_20B,
    MeshConfig(fsdp=-1, ep=8),
    seq_len=4096,
    global_batch=1024,
    lr=3e-4,
    moe=MoEConfig(aux_weight=0.001, capacity_factor=1.0625),
)
