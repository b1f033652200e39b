"""Qwen3 30B-A3B, meant for 16 to 512 GPUs of 80 GB: the 128 experts of a layer inside each node, sharded across.

4 M tokens a step. Recomputation and micro-batches are the fastest that fit the GPUs at hand. The weight of the
balancing loss is that of its `config.json`. Buffers are for balanced routing; what exceeds them takes rounds
of an eighth.
"""

from ultrascale_jax.config import MeshConfig, MoEConfig
from ultrascale_jax.configs import shapes
from ultrascale_jax.configs.pretraining import pretraining

config = pretraining(
    "qwen3_30b_a3b",
    shapes.QWEN3_30B_A3B,
    MeshConfig(fsdp=-1, ep=8),
    seq_len=4096,
    global_batch=1024,
    lr=3e-4,
    moe=MoEConfig(aux_weight=0.001, capacity_factor=1.0625),
)
