"""Preference optimisation (DPO) of a chat model that exists: `--train.init-from` replaces the model here.

The rate is for all parameters; adapters (`--train.lora.rank 16`) stand ten times that. A row holds as many pairs as
fit, each with both answers, and the prompt before either.
"""

from ultrascale_jax.config import (
    AUTO,
    CheckpointConfig,
    Config,
    DataConfig,
    Dpo,
    LogConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)

config = Config(
    model=ModelConfig(),
    data=DataConfig(source="tokens:shards/pairs", tokenizer="bytes", seq_len=2048),
    optim=OptimConfig(lr=5e-7, warmup_steps=20, weight_decay=0.0, betas=(0.9, 0.999)),
    train=TrainConfig(
        dpo=Dpo(beta=0.1),
        steps=500,
        global_batch=16,
        microbatches=AUTO,
        remat="auto",
        eval_every=100,
    ),
    checkpoint=CheckpointConfig(every=100),
    log=LogConfig(run_dir="out/dpo"),
)
