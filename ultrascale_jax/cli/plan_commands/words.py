"""A configuration as words of the command line: what `command_line.parse` would read it from."""

import dataclasses

from ultrascale_jax.cli import command_line
from ultrascale_jax.config import Config

ALWAYS = ("global_batch", "microbatches", "zero", "remat")
"""Fields of `train` that are written even where the recipe has the same."""


def recipe_of(argv: list[str]) -> str:
    """The recipe that the command line `argv` begins with, or the default one."""
    return argv[0] if argv and not argv[0].startswith("-") else command_line.DEFAULT_RECIPE


def words(recipe: str, cfg: Config) -> list[str]:
    """The recipe, the mesh, and every field in which `cfg` differs from the recipe."""
    found = [recipe, "--mesh", cfg.mesh.text]
    default = command_line.load_recipe(recipe)
    for section in dataclasses.fields(cfg):
        if section.name != "mesh":
            always = ALWAYS if section.name == "train" else ()
            before, after = getattr(default, section.name), getattr(cfg, section.name)
            found += command_line.changes(section.name, before, after, always)
    return found
