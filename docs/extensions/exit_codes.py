"""The page of exit codes: each constant of `launch/exit_codes.py`, with the text below it."""

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from ultrascale_jax.launch import exit_codes

PLACE = "<!-- exit codes -->"
"""Where the page gets the table."""


def code_rows() -> Iterator[str]:
    """Yield a row for each constant of the module, in its order: the code, the name, the text."""
    for constant, doc in pairwise(ast.parse(inspect.getsource(exit_codes)).body):
        match constant, doc:
            case ast.Assign(targets=[ast.Name(name)]), ast.Expr(ast.Constant(str(text))):
                yield f"| {getattr(exit_codes, name)} | `{name}` | {' '.join(text.split())} |"


def add_codes(app: Any, page: str, source: list[str]) -> None:
    """Put the table of codes into their page."""
    if page == "exit_codes":
        table = ["| code | constant | |", "|---|---|---|", *code_rows()]
        source[0] = source[0].replace(PLACE, "\n".join(table))


def setup(app: Any) -> dict[str, bool]:
    """Let Sphinx complete the page of exit codes as it reads it."""
    app.connect("source-read", add_codes)
    return {"parallel_read_safe": True}
