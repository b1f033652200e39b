"""A configuration as words of the command line: what `command_line.parse` would read it from."""

import dataclasses
from typing import Any

from scripts import command_line
from ultrascale_jax.config import Config

ALWAYS = ("global_batch", "micro_batches", "zero", "remat")
"""Fields of `train` that are written even where the recipe has the same."""


def recipe_of(argv: list[str]) -> str:
    """The recipe that the command line `argv` begins with, or the default one."""
    return argv[0] if argv and not argv[0].startswith("-") else command_line.DEFAULT_RECIPE


def words(recipe: str, cfg: Config) -> list[str]:
    """The recipe, the mesh, and every field in which `cfg` differs from the recipe."""
    axes = [f"{axis}={size}" for axis, size in cfg.mesh.sizes.items() if size != 1]
    sections = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg) if f.name != "mesh"}
    default = command_line.load_recipe(recipe)
    rest = [
        word
        for name, section in sections.items()
        for word in _changes(name, getattr(default, name), section)
    ]
    return [recipe, "--mesh", ",".join(axes) or "dp=1", *rest]


def _changes(name: str, default: Any, section: Any) -> list[str]:
    found: list[str] = []
    for field in dataclasses.fields(section):
        old, new = getattr(default, field.name), getattr(section, field.name)
        path = f"{name}.{field.name}"
        if dataclasses.is_dataclass(new) and dataclasses.is_dataclass(old):
            found += _changes(path, old, new)
        elif new != old or (name == "train" and field.name in ALWAYS):
            found += _words(path.replace("_", "-"), new)
    return found


def _words(path: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        section, _, name = path.rpartition(".")
        return [f"--{path}" if value else f"--{section}.no-{name}"]
    values = value if isinstance(value, tuple) else (value,)
    return [f"--{path}", *map(str, values)]
