"""Recipes, the GPUs that they are meant for, and how a test gives or takes what they choose for those at hand."""

import dataclasses

from ultrascale_jax.config import AUTO, Config


def pinned(recipe: Config, remat: str = "full", microbatches: int = 1) -> Config:
    """`recipe` with these values in place of `auto`."""
    train = dataclasses.replace(recipe.train, remat=remat, microbatches=microbatches)
    return dataclasses.replace(recipe, train=train)


def left_open(recipe: Config) -> Config:
    """`recipe` with both values on `auto`."""
    return pinned(recipe, "auto", AUTO)
