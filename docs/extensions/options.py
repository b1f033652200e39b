"""The page of options: every option of a run, with its default and its text, from the configuration itself."""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from ultrascale_jax.config import Config
from ultrascale_jax.config.section import Section, texts_of


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def option_rows(kind: type, path: str) -> Iterator[str]:
    """Yield a row of the page for each option of a section, and of the sections that it may have."""
    hints, texts = get_type_hints(kind), texts_of(kind)
    for field in dataclasses.fields(kind):
        part: Any = next(
            filter(_is_section, (hints[field.name], *get_args(hints[field.name]))), None
        )
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


def setup(app: Any) -> dict[str, bool]:
    """Let Sphinx complete the page of options as it reads it."""
    app.connect("source-read", add_options)
    return {"parallel_read_safe": True}
