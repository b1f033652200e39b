"""gpt-oss 20B, meant for 16 to 64 GPUs of 80 GB: the 32 experts of a layer inside each node, sharded across.

4 M tokens a step. The width, 2,880, is divisible by 64 and no higher power of two: with more GPUs add `dp`.
Recomputation and micro-batches are the fastest that fit the GPUs at hand. Buffers are for balanced routing; what
exceeds them takes rounds of an eighth.
"""

from ultrascale_jax.config import (
    AUTO,
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    MeshConfig,
    MoEConfig,
    OptimConfig,
    TrainConfig,
)
from ultrascale_jax.configs import shapes

config = Config(
    model=shapes.GPT_OSS_20B,
    mesh=MeshConfig(fsdp=-1, ep=8),
    data=DataConfig(source="tokens:data/fineweb", tokenizer="data/tokenizer.json", seq_len=4096),
    optim=OptimConfig(lr=3e-4, warmup_steps=2000),
    train=TrainConfig(
        steps=100_000, global_batch=1024, microbatches=AUTO, remat="auto", eval_every=1000
    ),
    moe=MoEConfig(aux_weight=0.001, capacity_factor=1.0625),
    checkpoint=CheckpointConfig(every=500),
    log=LogConfig(run_dir="out/gpt_oss_20b"),
)
