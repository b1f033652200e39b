"""DeepSeek-V3 671B on 2,048 GPUs of 80 GB, much as in its report (arXiv 2412.19437, sections 3.2 and 4.2).

64 ranks of experts on 8 nodes, ZeRO-1; 63 M tokens a step. The report has 16 pipeline ranks and DualPipe's table; here
8 ranks have four stages each, whose ticks overlap their passes as DualPipe's do. With 60 micro-batches of a sequence
each their bubble is 3%. Recomputation and micro-batches are the fastest that fit the GPUs at hand.
Experts are balanced by their biases, and each sequence by a small loss. Buffers are for balanced routing; what exceeds
them takes rounds of an eighth. Not of the report either: FP8, batches that grow, the token after the next.
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
    PipelineConfig,
    TrainConfig,
)
from ultrascale_jax.configs import shapes

config = Config(
    model=shapes.DEEPSEEK_V3,
    mesh=MeshConfig(pp=8, fsdp=-1, ep=64),
    pp=PipelineConfig(schedule="interleaved", virtual=4),
    data=DataConfig(
        source="tokens:data/fineweb",
        tokenizer="data/tokenizer.json",
        seq_len=4096,
        document_mask=False,
    ),
    optim=OptimConfig(lr=2.2e-4, schedule="wsd", decay_steps=68_000, warmup_steps=2000),
    train=TrainConfig(
        steps=235_000, global_batch=15360, microbatches=AUTO, zero=1, remat="auto", eval_every=1000
    ),
    moe=MoEConfig(
        capacity_factor=1.0625,
        a2a_groups=8,
        aux_weight=0.0001,
        aux_over="sequence",
        bias_rate=0.001,
    ),
    checkpoint=CheckpointConfig(every=500),
    log=LogConfig(run_dir="out/deepseek_v3"),
)
