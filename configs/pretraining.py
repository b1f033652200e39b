"""The fields that recipes of large models share: data, length, and all that is chosen for the GPUs at hand."""

from typing import Any

from ultrascale_jax.config import (
    AUTO,
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)


def pretraining(
    name: str,
    model: ModelConfig,
    mesh: MeshConfig,
    *,
    seq_len: int,
    global_batch: int,
    lr: float,
    **sections: Any,
) -> Config:
    """Return the recipe `name`, with the recomputation and micro-batches that are the fastest of what fits."""
    return Config(
        model=model,
        mesh=mesh,
        data=DataConfig(
            source="tokens:data/fineweb", tokenizer="data/tokenizer.json", seq_len=seq_len
        ),
        optim=OptimConfig(lr=lr, warmup_steps=2000),
        train=TrainConfig(
            steps=100_000,
            global_batch=global_batch,
            microbatches=AUTO,
            remat="auto",
            eval_every=1000,
        ),
        checkpoint=CheckpointConfig(every=500),
        log=LogConfig(run_dir=f"out/{name}"),
        **sections,
    )
