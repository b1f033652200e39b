"""Read the documents, conversations or preference pairs of many files, in order, with a bar of progress."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.progress import Progress

from ultrascale_jax.config import UserError, require
from ultrascale_jax.data.conversations import kind_of_row, without_nulls
from ultrascale_jax.data.documents import (
    JSON_LINES,
    File,
    kind_of,
    read_file,
    read_parquet_rows,
    read_rows,
    whole_characters,
)
from ultrascale_jax.storage.remote import RemoteFile, asking

ROWS = {**dict.fromkeys(JSON_LINES, read_rows), ".parquet": read_parquet_rows}
"""Reader of the rows of a file that may hold conversations and pairs."""


def find_kind(paths: Sequence[File], field: str) -> tuple[str, str]:
    """Return the option that the input's first row needs, and a description of the row; empty for text."""
    rows = ((path, first_row(path)) for path in paths)
    path, row = next((pair for pair in rows if pair[1] is not None), (None, None))
    is_text = isinstance(row, dict) and isinstance(row.get(field), str)
    kind = None if is_text else kind_of_row(row)
    if kind is None:
        return "", ""
    names = "conversations" if kind == "chat" else "preference pairs (chosen, rejected)"
    return kind, f"{path} has {names}: --{kind}\n"


def first_row(path: File) -> Any:
    """Return the first row of an input that may hold conversations; None if there is none, or no such input."""
    reader = ROWS.get(kind_of(path))
    return next((row for _, row, _ in reader(path)), None) if reader else None


def read_documents(
    paths: Sequence[File],
    field: str,
    progress: Progress,
    description: str,
    render: Callable[[Any], str] | None = None,
) -> Iterator[str]:
    """Yield the documents of all files that are not empty, in order; move a progress bar by bytes.

    With `render` they are its results for the rows.
    """
    sizes = [path.stat().st_size for path in paths]
    task = progress.add_task(description, total=sum(sizes) or None)
    bytes_done = 0
    for size, path in zip(sizes, paths, strict=True):
        rows = read_rendered(path, render) if render else read_file(path, field)
        for count, (text, done) in enumerate(_asked(path, rows)):
            if text:
                yield text
            if count % 256 == 0:
                progress.update(task, completed=bytes_done + done)
        bytes_done += size
        progress.update(task, completed=bytes_done)


def _asked[Item](path: File, items: Iterator[Item]) -> Iterator[Item]:
    """Yield `items`; an error of object storage becomes a `RemoteError`."""
    with asking(str(path)) if isinstance(path, RemoteFile) else contextlib.nullcontext():
        yield from items


def rendered(render: Callable[[Any], str], row: Any, where: str) -> str:
    """Return the conversation or pair of a row, rendered. Raises `UserError` that begins with `where`."""
    try:
        return whole_characters(render(row))
    except UserError as error:
        raise UserError(f"{where} {error}") from None


def read_rendered(path: File, render: Callable[[Any], str]) -> Iterator[tuple[str, int]]:
    """Yield every row's conversation or pair, rendered, and the bytes read so far."""
    fix = "is no file of JSON lines or Parquet, as conversations and pairs are; leave it out of the pattern"
    require(kind_of(path) in ROWS, "input", str(path), fix)
    unit = "line" if kind_of(path) in JSON_LINES else "row"
    for number, row, done in ROWS[kind_of(path)](path):
        row = row if unit == "line" else without_nulls(row)
        yield rendered(render, row, f"input={str(path)!r}: {unit} {number}"), done
