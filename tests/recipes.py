"""Recipes, the GPUs that they are meant for, and how a test gives or takes what they choose for those at hand."""

import dataclasses

from ultrascale_jax.config import AUTO, Config

MEANT_FOR = {
    "smollm2_135m": (22.0, (1, 8, 64)),
    "llama32_1b": (None, (1, 8, 64)),
    "llama3_8b": (None, (8, 16, 32, 64, 128, 256, 512)),
    "llama3_8b_128k": (None, (8, 16, 32, 64)),
    "llama3_8b_1m": (None, (64, 128, 256)),
    "llama3_70b": (None, (64, 512, 1024)),
    "llama3_405b": (None, (512, 1024, 4096)),
    "qwen3_8b": (None, (8, 64, 512)),
    "qwen3_32b": (None, (32, 256, 1024)),
    "gemma3_12b": (None, (8, 64, 256)),
    "gpt_oss_20b": (None, (16, 64)),
    "demo": (None, (1, 2, 8)),
    "debug": (None, (1, 8)),
    "moe_debug": (None, (1, 8)),
    "mixtral_8x7b": (None, (64, 512, 1024)),
    "qwen3_30b_a3b": (None, (16, 64, 512)),
    "qwen3_next_80b_a3b": (None, (64, 512)),
    "deepseek_v3": (None, (2048,)),
    "finetune": (None, (1, 8)),
    "dpo": (None, (1, 8)),
    "gpt_peer": (None, (1,)),
}
"""Recipe to the GiB that CUDA reports of one GPU, None for an H100's, and numbers of GPUs."""


def pinned(recipe: Config, remat: str = "full", microbatches: int = 1) -> Config:
    """`recipe` with these values in place of `auto`."""
    train = dataclasses.replace(recipe.train, remat=remat, microbatches=microbatches)
    return dataclasses.replace(recipe, train=train)


def left_open(recipe: Config) -> Config:
    """`recipe` with both values on `auto`."""
    return pinned(recipe, "auto", AUTO)
