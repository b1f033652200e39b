"""Llama 3.1 8B at 131,072 tokens, meant for 8 to 64 GPUs of 80 GB: each sequence split over the 8 GPUs of a node.

A batch of 32 sequences (4 M tokens), in as few micro-batches as fit: GPUs of 80 GB take one sequence a node at a time.
The GPUs of a node exchange heads for sequence.
It is the stage that stretches 8,192 tokens to 131,072, by `--train.init-from`. Attention
crosses documents, as in arXiv 2504.06214: it is then plain causal, without a mask, and every sequence shows the model
all distances; positions that restart show only those inside a document.
"""

from ultrascale_jax.config import (
    AUTO,
    CheckpointConfig,
    Config,
    ContextConfig,
    DataConfig,
    LogConfig,
    MeshConfig,
    OptimConfig,
    TrainConfig,
)
from ultrascale_jax.configs import shapes

config = Config(
    model=shapes.LLAMA31_8B,
    mesh=MeshConfig(cp=8, fsdp=-1),
    cp=ContextConfig(ulysses=8),
    data=DataConfig(
        source="tokens:data/long",
        tokenizer="data/tokenizer.json",
        seq_len=131_072,
        document_mask=False,
    ),
    optim=OptimConfig(lr=3e-5, warmup_steps=50),
    train=TrainConfig(
        steps=1000,
        global_batch=32,
        microbatches=AUTO,
        remat="auto",
        eval_every=100,
    ),
    checkpoint=CheckpointConfig(every=100),
    log=LogConfig(run_dir="out/llama3_8b_128k"),
)
