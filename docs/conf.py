"""Sphinx builds the site from these pages: `make docs`. The page of options comes from the configuration itself."""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, get_args, get_type_hints

import ultrascale_jax
from ultrascale_jax.config import Config

project = "ultrascale_jax"
author = "The ultrascale_jax developers"
version = release = ultrascale_jax.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"ultrascale_jax {version}"
html_static_path: list[str] = []
myst_heading_anchors = 4
autodoc_typehints = "description"
autodoc_member_order = "alphabetical"


def descriptions(kind: type) -> dict[str, str]:
    """Return the text below each field of a dataclass."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in pairwise(body.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }


def option_rows(kind: type, path: str) -> Iterator[str]:
    """Yield a row of the page for each option of a section, and of the sections that it may have."""
    hints, texts = get_type_hints(kind), descriptions(kind)
    for field in dataclasses.fields(kind):
        kinds = (hints[field.name], *get_args(hints[field.name]))
        part: Any = next(filter(dataclasses.is_dataclass, kinds), None)
        name = f"{path}.{field.name}"
        if part is not None:
            yield from option_rows(part, name)
            continue
        default = "" if field.default is dataclasses.MISSING else field.default
        option, value = f"--{name.replace('_', '-')}", "" if default == "" else f"`{default}`"
        yield f"| `{option}` | {value} | {texts.get(field.name, '').replace('|', '&#124;')} |"


def add_options(app: Any, page: str, source: list[str]) -> None:
    """Append every option of a run, with its default and its text, to the page of options."""
    if page != "options":
        return
    lines = [source[0]]
    for section in dataclasses.fields(Config):
        kind = get_type_hints(Config)[section.name]
        words = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
        head = ["| option | default | |", "|---|---|---|"]
        lines += [f"## {section.name}", "", words, "", *head, *option_rows(kind, section.name), ""]
    source[0] = "\n".join(lines)


def as_code(*event: Any) -> None:
    """Turn a docstring's `words` into code: reStructuredText wants two backticks."""
    lines: list[str] = event[-1]
    text = re.sub(
        r"(?<!`)`([^`]+)`(?!`)", lambda m: f"``{' '.join(m[1].split())}``", "\n".join(lines)
    )
    lines[:] = text.split("\n")


def setup(app: Any) -> None:
    """Let Sphinx complete the page of options, and read our docstrings before its own extensions do."""
    app.connect("source-read", add_options)
    app.connect("autodoc-process-docstring", as_code, priority=400)
