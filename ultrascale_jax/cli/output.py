"""Print results of commands: JSON of a verb, tables, progress bars; write a file."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ultrascale_jax.config import UserError, require
from ultrascale_jax.figures.figure import Figure
from ultrascale_jax.plan.prediction import SCHEMA


def console(width: int) -> Console:
    """Return the console of stdout; where that is no terminal it has `width` columns, so that rows stay whole."""
    return Console() if sys.stdout.isatty() else Console(width=width)


def table(words: Sequence[str], numbers: Sequence[str], more: Sequence[str] = ()) -> Table:
    """Return an empty table: columns of `words`, of `numbers`, which are aligned right, and of `more` words."""
    made = Table(*words)
    for name in numbers:
        made.add_column(name, justify="right")
    for name in more:
        made.add_column(name)
    return made


def progress(*, transient: bool = False) -> Progress:
    """Return a bar on stderr that counts done things."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    stderr = Console(stderr=True)
    hidden = transient and not stderr.is_terminal
    return Progress(
        *columns, TimeElapsedColumn(), console=stderr, transient=transient, disable=hidden
    )


def verb_json(verb: str, values: dict[str, Any]) -> str:
    """Return the JSON object of a verb of the planner, with the version of its fields."""
    return json.dumps({"verb": verb, "schema": SCHEMA, **values})


def write_figure(figure: Figure, path: Path) -> str:
    """Write the figure that `--figure` asks for, and return the line that says so.

    Raises `UserError` if the file is no PNG or cannot be written, or matplotlib is missing.
    """
    require(path.suffix == ".png", "figure", str(path), "must end in .png")
    return write_file("figure", path, figure.draw)


def write_file(option: str, path: Path, write: Callable[[Path], object]) -> str:
    """Let `write` write the file that an option asks for, into a folder that is made, and return the line that says so.

    Raises `UserError` if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        fix = f"cannot be written: {error.strerror}"
        raise UserError(f"{option}={str(path)!r}: {fix}") from None
    return f"wrote {path}"
