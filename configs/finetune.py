"""Fine-tuning of a model that exists: `--train.init-from` replaces the model here.

A low rate, as for a model that has learned already, with checkpoints and evaluations every 100 steps.
"""

from ultrascale_jax.config import (
    AUTO,
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)

config = Config(
    model=ModelConfig(),
    data=DataConfig(source="text:data/*.txt", tokenizer="bytes", seq_len=2048),
    optim=OptimConfig(lr=1e-5, warmup_steps=20, weight_decay=0.01),
    train=TrainConfig(steps=500, global_batch=16, microbatches=AUTO, remat="auto", eval_every=100),
    checkpoint=CheckpointConfig(every=100),
    log=LogConfig(run_dir="out/finetune"),
)
