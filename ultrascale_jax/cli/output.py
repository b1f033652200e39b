"""Print results and progress of commands: JSON of a verb, tables, lines on stderr; write a file."""

import contextlib
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from ultrascale_jax.config import UserError
from ultrascale_jax.figures.figure import Figure
from ultrascale_jax.plan.prediction import SCHEMA
from ultrascale_jax.plan.report.layout import table as table

type Tell = Callable[[str], None]
"""Gets the progress of a command, as text."""

FIRST_S, EVERY_S = 0.5, 10.0
"""Seconds until the first line of `working` where stderr is no terminal, and between lines."""


def console(width: int) -> Console:
    """Return the console of stdout; where that is no terminal it has `width` columns, so that rows are not wrapped."""
    return Console() if sys.stdout.isatty() else Console(width=width)


@contextlib.contextmanager
def working(text: str) -> Iterator[Tell]:
    """Show `text` on stderr while the command works in this block; yield a function that changes it.

    A terminal has a line that moves and is gone at the end. Elsewhere a line appears now and then, and none if the
    block is quick.
    """
    stderr = Console(stderr=True)
    if stderr.is_terminal:
        spinner = Spinner("dots", text=Text(text))
        with Live(spinner, console=stderr, transient=True, redirect_stdout=False):
            yield lambda changed: spinner.update(text=Text(changed))
        return
    texts, done, begun = deque([text], 1), threading.Event(), time.monotonic()

    def tell() -> None:
        wait_s = FIRST_S
        while not done.wait(wait_s):
            elapsed = f"{time.monotonic() - begun:.0f} s"
            print(f"{texts[-1]} ({elapsed})", file=sys.stderr, flush=True)
            wait_s = EVERY_S

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield texts.append
    finally:
        done.set()
        thread.join()


def without_controls(text: str) -> str:
    """Return `text` without the control characters that a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def plain(text: str) -> Text:
    """Return `text` for a table: without markup, and printable."""
    return Text(without_controls(text))


def verb_json(verb: str, values: dict[str, Any]) -> str:
    """Return the JSON object of a command, with the version of its fields."""
    return json.dumps({"verb": verb, "schema": SCHEMA, **values})


def show(
    verb: str, result: Any, *, as_json: bool, figure: Path | None = None, width: int = 120
) -> None:
    """Print `result`, in `width` columns where stdout is no terminal, or as JSON, and write the figure if there is one.

    Args:
      verb: the command.
      result: has `__rich__` for tables, `asdict` for the fields of the JSON object and, if it can be drawn, `figure`.
      as_json: print one JSON object with the version of its fields.
      figure: the file of `--figure`; raises `UserError` as `write_figure` does.
      width: columns.
    """
    written = None if figure is None else write_figure(result.figure(), figure)
    if as_json:
        print(verb_json(verb, result.asdict()))
        return
    shown = console(width)
    shown.print(result, crop=False)
    if written is not None:
        shown.print(written, markup=False, highlight=False, soft_wrap=True)


def write_figure(figure: Figure, path: Path) -> str:
    """Write the figure that `--figure` asks for, and return the line that says so.

    Raises `UserError` if the file cannot be written, or matplotlib is missing.
    """
    with writing("figure", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.draw(path)
    return f"wrote {path}"


@contextlib.contextmanager
def writing(option: str, path: object) -> Iterator[None]:
    """Turn an error of the file system in the block into a `UserError` that names the option."""
    try:
        yield
    except OSError as error:
        fix = f"cannot be written ({error.strerror or error}); name a place that can be"
        raise UserError(f"{option}={str(path)!r}: {fix}") from None
