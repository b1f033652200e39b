"""Llama 3 8B at 1,048,576 tokens, meant for 64 to 256 GPUs of 80 GB: each sequence split over 64.

A batch of 4 sequences (4 M tokens), in as few micro-batches as fit: GPUs of 80 GB take one sequence on each 64 at a
time. The 8 GPUs of a node exchange heads for sequence, and the nodes pass keys and values round a ring of 8. YaRN
stretches 8,192 tokens by 128 with the thresholds of arXiv 2504.06214, which made Llama 3.1 8B read 1M; as there,
attention crosses documents (see `llama3_8b_128k`).
"""

import dataclasses

from ultrascale_jax.config import (
    AUTO,
    CheckpointConfig,
    Config,
    ContextConfig,
    DataConfig,
    LogConfig,
    MeshConfig,
    OptimConfig,
    RopeScaling,
    TrainConfig,
)
from ultrascale_jax.configs import shapes

ROPE = RopeScaling(kind="yarn", factor=128.0, high_freq_factor=4.0)

config = Config(
    model=dataclasses.replace(shapes.LLAMA3_8B, rope_scaling=ROPE),
    mesh=MeshConfig(cp=64, fsdp=-1),
    cp=ContextConfig(ulysses=8),
    data=DataConfig(
        source="tokens:data/long",
        tokenizer="data/tokenizer.json",
        seq_len=1_048_576,
        document_mask=False,
    ),
    optim=OptimConfig(lr=3e-5, warmup_steps=20),
    train=TrainConfig(
        steps=250,
        global_batch=4,
        microbatches=AUTO,
        remat="auto",
        eval_every=50,
        eval_batches=1,
    ),
    checkpoint=CheckpointConfig(every=50),
    log=LogConfig(run_dir="out/llama3_8b_1m"),
)
