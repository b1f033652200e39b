"""Mixtral 8x7B, meant for 64 to 1,024 GPUs of 80 GB: the 8 experts of a layer inside each node, sharded across.

4 M tokens a step. Recomputation and micro-batches are the fastest that fit the GPUs at hand. The weight of the
balancing loss is that of its `config.json`. Buffers are for balanced routing on 64 GPUs; what exceeds them takes
further, short rounds. From 512 GPUs on, with fewer rows from rank to rank, chance alone makes these frequent: take a
`moe.capacity_factor` of 1.125 or 1.25.
"""

from ultrascale_jax.config import MeshConfig, MoEConfig
from ultrascale_jax.configs import shapes
from ultrascale_jax.configs.pretraining import pretraining

config = pretraining(
    "mixtral_8x7b",
    shapes.MIXTRAL_8X7B,
    MeshConfig(fsdp=-1, ep=8),
    seq_len=4096,
    global_batch=1024,
    lr=2e-4,
    moe=MoEConfig(aux_weight=0.02, capacity_factor=1.0625),
)
