"""Completion of commands and options for a shell, by tyro: `source <(ultrascale --completion bash)`."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Mapping
from typing import Annotated, Any

import tyro
from tyro.extras import SubcommandApp

from ultrascale_jax.cli import command_line
from ultrascale_jax.cli.recipes import DEFAULT_RECIPE, load_recipe
from ultrascale_jax.config import require

SHELLS = ("bash", "zsh")


def print_script(shell: str, commands: Mapping[str, Any]) -> None:
    """Print the script that completes `commands`, the verbs below them and all their options in `shell`.

    Args:
      shell: `bash` or `zsh`; another is a `UserError`.
      commands: modules by name; each has `Options`, or `verbs`, which returns the options of each verb.
    """
    require(shell in SHELLS, "completion", shell, f"choose {' or '.join(SHELLS)}")
    app = SubcommandApp()
    for name, module in commands.items():
        if not hasattr(module, "verbs"):
            app.command(_form(module.Options), name=name)
            continue
        below = SubcommandApp()
        for verb, options in module.verbs().items():
            below.command(_form(options), name=verb)
        app.command(below, name=name)
    arguments = ["--tyro-print-completion", shell]
    script = io.StringIO()
    try:
        with contextlib.redirect_stdout(script):
            app.cli(prog="ultrascale", args=arguments, config=(tyro.conf.AvoidSubcommands,))
    finally:
        print(re.sub(r"(?m)^COMPLETION_SPEC = .*", _in_one_line, script.getvalue()), end="")


def _in_one_line(options: re.Match[str]) -> str:
    """Join the lines of the options' texts, each of which the shell would offer as a word."""
    return re.sub(r"\\n\s*", " ", options[0])


def _form(options: type) -> Any:
    """Return the dataclass of a command: its options and, if it runs a recipe, the recipe and all its fields."""
    if not issubclass(options, command_line.Options):
        return options
    fields = [
        ("recipe", tyro.conf.Positional[str], DEFAULT_RECIPE),
        ("options", Annotated[options, tyro.conf.arg(name="")], options()),
        ("config", Annotated[Any, tyro.conf.arg(name="")], load_recipe(DEFAULT_RECIPE)),
    ]
    return dataclasses.make_dataclass("Command", fields, frozen=True)
