"""The default: a small model of Python source code, byte by byte; under two minutes on two CPU cores."""

from ultrascale_jax.config import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)

config = Config(
    model=ModelConfig(
        vocab_size=256,
        d_model=128,
        d_ff=384,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
    ),
    data=DataConfig(source="python-stdlib", tokenizer="bytes", seq_len=256),
    optim=OptimConfig(lr=5e-3, warmup_steps=20),
    train=TrainConfig(steps=600, global_batch=8, precision="fp32", remat="full", eval_every=250),
    log=LogConfig(run_dir="out/demo"),
)
