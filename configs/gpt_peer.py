"""The benchmark's small model, float32 on one CPU device: the same shape that other trainers were timed with."""

from ultrascale_jax.config import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    TrainConfig,
)

config = Config(
    model=ModelConfig(
        vocab_size=8192,
        d_model=256,
        d_ff=1024,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
    ),
    data=DataConfig(source="synthetic", seq_len=512, document_mask=False),
    train=TrainConfig(steps=50, global_batch=4, zero=0, precision="fp32", remat="dots"),
    log=LogConfig(run_dir="out/gpt_peer"),
)
