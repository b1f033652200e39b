"""Completion of commands, recipes and options for a shell, by tyro: `source <(ultrascale --completion bash)`."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Mapping
from typing import Annotated, Any

import tyro
from tyro.extras import SubcommandApp

from ultrascale_jax.cli import command_line
from ultrascale_jax.cli.recipes import DEFAULT_RECIPE, load_recipe, recipes
from ultrascale_jax.config import require

SHELLS = ("bash", "zsh")


def print_script(shell: str, commands: Mapping[str, Any]) -> None:
    """Print the script that completes `commands`, the verbs below them, recipes and all their options in `shell`.

    Args:
      shell: `bash` or `zsh`; another is a `UserError`.
      commands: modules by name; each has `Options`, or `verbs`, which returns the options of each verb.
    """
    require(shell in SHELLS, "completion", shell, f"choose {' or '.join(SHELLS)}")
    app, with_recipe = SubcommandApp(), list[tuple[str, ...]]()

    def add(to: SubcommandApp, path: tuple[str, ...], options: type) -> None:
        runs_recipe = issubclass(options, command_line.Options)
        form: Any = _form(options) if runs_recipe else options
        to.command(form, name=path[-1])
        with_recipe.extend([path] * runs_recipe)

    for name, module in commands.items():
        if not hasattr(module, "verbs"):
            add(app, (name,), module.Options)
            continue
        below = SubcommandApp()
        for verb, options in module.verbs().items():
            add(below, (name, verb), options)
        app.command(below, name=name)
    arguments = ["--tyro-print-completion", shell]
    script = io.StringIO()
    try:
        with contextlib.redirect_stdout(script):
            app.cli(prog="ultrascale", args=arguments, config=(tyro.conf.AvoidSubcommands,))
    finally:
        code = _recipes_below(with_recipe)
        print(
            re.sub(r"(?m)^COMPLETION_SPEC = .*\n", lambda spec: spec[0] + code, script.getvalue()),
            end="",
        )


def _recipes_below(paths: list[tuple[str, ...]]) -> str:
    """Return Python that adds the recipes to the script's tree of commands, each with the options of its command."""
    return f"""\
for path in {paths}:
    command = COMPLETION_SPEC
    for word in path:
        command = command["subcommands"][word]
    command["subcommands"] = dict.fromkeys({recipes()}, {{**command, "description": "recipe"}})
"""


def _form(options: type) -> Any:
    """Return the dataclass of a command that runs a recipe: its options, and all fields of the recipe."""
    fields = [
        ("options", Annotated[options, tyro.conf.arg(name="")], options()),
        ("config", Annotated[Any, tyro.conf.arg(name="")], load_recipe(DEFAULT_RECIPE)),
    ]
    return dataclasses.make_dataclass("Command", fields, frozen=True)
