"""SmolLM2-135M, meant for one node of eight GPUs of 24 GB, which split the batch.

Nine heads have no useful tensor group, so more GPUs mean more data parallelism. The number of micro-batches is the
fastest that fits the GPUs at hand.
"""

from ultrascale_jax.config import (
    AUTO,
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    MeshConfig,
    OptimConfig,
    TrainConfig,
)
from ultrascale_jax.configs import shapes

config = Config(
    model=shapes.SMOLLM2_135M,
    mesh=MeshConfig(dp=-1, fsdp=1),
    data=DataConfig(source="tokens:data/fineweb", tokenizer="data/tokenizer.json", seq_len=2048),
    optim=OptimConfig(lr=3e-3, schedule="wsd", warmup_steps=500, weight_decay=0.01),
    train=TrainConfig(
        steps=10_000, global_batch=256, microbatches=AUTO, zero=0, remat="selective", eval_every=500
    ),
    checkpoint=CheckpointConfig(every=500),
    log=LogConfig(run_dir="out/smollm2_135m"),
)
