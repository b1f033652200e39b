"""Tiny, with 8 experts and all that a layer of them can have: for trying meshes, `ep` too, with `--fake-devices 8`."""

from ultrascale_jax.config import (
    Config,
    DataConfig,
    Experts,
    LogConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    TrainConfig,
)

config = Config(
    model=ModelConfig(
        vocab_size=256,
        d_model=64,
        d_ff=128,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        head_dim=8,
        experts=Experts(
            num=8,
            top_k=2,
            d_ff=32,
            shared=1,
            dense_layers=1,
            scores="sigmoid",
            groups=4,
            groups_per_token=2,
            bias=True,
        ),
    ),
    data=DataConfig(source="python-stdlib", tokenizer="bytes", seq_len=256),
    optim=OptimConfig(lr=3e-3),
    train=TrainConfig(steps=10, global_batch=16, precision="fp32", eval_batches=1),
    moe=MoEConfig(aux_weight=0.001, z_loss=0.0001),
    log=LogConfig(run_dir="out/moe_debug"),
)
