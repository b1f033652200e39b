"""Write a configuration as arguments (`--train.zero 3`), run `plan` with them, and parse choices (`tp=8,pp=1`)."""

import dataclasses
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ultrascale_jax.cli import command_line
from ultrascale_jax.cli.command_line import parse_remat
from ultrascale_jax.cli.plan_commands.common import Options
from ultrascale_jax.config import REMAT_NAMES, SCHEDULES, Config, require
from ultrascale_jax.config.section import switch
from ultrascale_jax.plan.search.search_space import FIELDS, OPTIONS, STASHES

ALWAYS = ("global_batch", "microbatches", "zero", "remat")
"""Fields of `train` that are written even where the recipe has the same."""


def words(recipe: str, cfg: Config) -> list[str]:
    """Return the recipe, the mesh, and every field in which `cfg` differs from the recipe."""
    default = command_line.load_recipe(recipe)
    return [recipe, "--mesh", cfg.mesh.text, *differences(default, cfg, ALWAYS)]


def differences(base: Config, target: Config, always: Sequence[str] = ()) -> list[str]:
    """Return the arguments that turn one configuration into the other but the mesh; `always` are fields of `train`."""
    changed = []
    for section in (field.name for field in dataclasses.fields(target) if field.name != "mesh"):
        old, new = getattr(base, section), getattr(target, section)
        changed += command_line.changes(section, old, new, always if section == "train" else ())
    return changed


def search_words(recipe: str, cfg: Config) -> list[str]:
    """Return the same without the mesh and all else that a search chooses."""
    options = [f"--{option.replace('_', '-')}" for option in OPTIONS.values()]
    chosen = {"--mesh", *options, *(switch(option, on=False) for option in options)}
    return command_line.without_options(words(recipe, cfg), chosen.__contains__)


def train_command(recipe: str, cfg: Config) -> str:
    """Return the command line that trains `cfg`."""
    return shlex.join(["ultrascale", "train", *words(recipe, cfg)])


def plan_command(verb: str, cfg: Config, options: Options) -> str:
    """Return the command line of a verb of `plan` for `cfg` on the machine of `options`."""
    machine = machine_words(options)
    return shlex.join(["ultrascale", "plan", verb, *words(options.recipe, cfg), *machine])


def machine_words(options: Options) -> list[str]:
    """Return the options that name the machine."""
    machine = ["--gpus", str(options.gpus)]
    machine += ["--gpu", options.gpu] if options.gpu else []
    return machine + (["--cluster", options.cluster] if options.cluster else [])


def start(verb: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Start a verb of `plan` in a process of its own, which prints JSON."""
    command = [sys.executable, "-m", "ultrascale_jax", "plan", verb, *arguments, "--json"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes)


def last_error(stderr: str, code: int) -> str:
    """Return the last line of a failed process, its error."""
    lines = stderr.strip().splitlines() or [f"it ended with code {code}"]
    return lines[-1].removeprefix("error: ")


NAMES = {"schedule": SCHEDULES, "stash": STASHES}
BOUNDS = {"zero": (0, 3), "folding": (0, 1)}


def parse_choices(name: str, text: str) -> dict[str, tuple[Any, ...]]:
    """Parse choices, as `tp=8,pp=1` or `fsdp=1,2,4 remat=none,full`; a `UserError` begins with `name`."""
    choices: dict[str, tuple[Any, ...]] = {}
    key = ""
    for word in re.split(r"[,\s]+", text.strip()):
        left, equals, right = word.rpartition("=")
        if equals:
            key = left.replace("-", "_")
            require(key in FIELDS, name, text, f"{left!r} is none of {', '.join(FIELDS)}")
            require(key not in choices, name, text, f"{key!r} is given twice")
        require(bool(key and right), name, text, "write it as tp=8,pp=1")
        values = choices.get(key, ())
        if key == "remat" and values and right.partition("+")[0] in REMAT_NAMES:
            values, right = values[:-1], f"{values[-1]},{right}"  # one more name of save:q,k,v
        choices[key] = (*values, _value(name, text, key, right))
    return choices


def _value(name: str, text: str, field: str, word: str) -> Any:
    if field == "remat":
        fix = "auto leaves remat free, as it is where it is not named"
        require(word != "auto", name, text, fix)
        return parse_remat(word)
    if field in NAMES:
        fix = f"{field} is one of {', '.join(NAMES[field])}"
        require(word in NAMES[field], name, text, fix)
        return word
    least, most = BOUNDS.get(field, (1, math.inf))
    fix = f"{field} is a number" + (
        f" from {least} to {most}" if field in BOUNDS else ", 1 or more"
    )
    require(word.isdecimal() and least <= int(word) <= most, name, text, fix)
    return bool(int(word)) if field == "folding" else int(word)
