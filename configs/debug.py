"""Tiny, and every axis can divide it by 8: for trying meshes with `--fake-devices 8` on a laptop."""

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
        vocab_size=256, d_model=64, d_ff=128, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=8
    ),
    data=DataConfig(source="python-stdlib", tokenizer="bytes", seq_len=256),
    optim=OptimConfig(lr=3e-3),
    train=TrainConfig(steps=10, global_batch=16, precision="fp32", eval_batches=1),
    log=LogConfig(run_dir="out/debug"),
)
