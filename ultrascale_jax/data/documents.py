"""Read documents from files, also of object storage: text, JSON lines (also compressed) and Parquet.

Every reader yields a document and about how many bytes of the file were read so far, and holds a part of the file at
a time. The suffix, in any case, tells the form of the documents, and the first bytes tell compression. A fault raises
`UserError` that names the file and the place.
"""

import codecs
import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ultrascale_jax.config import UserError, require
from ultrascale_jax.data.conversations import is_messages, kind_of_row
from ultrascale_jax.data.formats import (
    GZIP,
    HEAD_BYTES,
    PARQUET,
    ROWS,
    ZSTD,
    Format,
    form_of_line,
    format_of,
)
from ultrascale_jax.storage.foreign import parse_json, utf8
from ultrascale_jax.storage.remote import RemoteFile

File = Path | RemoteFile
"""A file of documents: on a disk or in object storage."""

JSON_LINES = (".jsonl", ".ndjson", ".json", ".jsonlines", ".jl")
COMPRESSED = {".gz": GZIP, ".gzip": GZIP, ".zst": ZSTD, ".zstd": ZSTD}
TABLES = {".csv": "CSV", ".tsv": "CSV with tabs"}

CHUNK_BYTES = 1 << 20
"""Bytes that are read at once."""


def read_file(path: File, field: str) -> Iterator[tuple[str, int]]:
    """The documents of a file in the form that its suffix tells; `field` holds their text."""
    readers = dict.fromkeys(JSON_LINES, read_json_lines)
    readers |= {".parquet": read_parquet}
    return readers.get(kind_of(path), read_text)(path, field)


def kind_of(path: File) -> str:
    """The suffix that tells the form of a file, in small letters, below that of compression."""
    compressed = path.suffix.lower() in COMPRESSED
    return (Path(path.stem).suffix if compressed else path.suffix).lower()


def begin_of(path: File) -> str:
    """The beginning of an error about a file of the input."""
    return f"input={str(path)!r}:"


@contextlib.contextmanager
def open_input(path: File, begin: str = "") -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Open a file of text, decompressed, and a function that tells how many of its own bytes were read so far.

    Errors begin with `begin`, or as `begin_of`. Raises `UserError` for a file that cannot be opened or is in a format
    that is not text, and inside the block for a compressed file that is damaged or cut short.
    """
    begin = begin or begin_of(path)
    with contextlib.ExitStack() as opened:
        raw = opened.enter_context(_open(path, begin))
        file: Any = raw
        damaged: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
        try:
            head = raw.read(HEAD_BYTES)
            raw.seek(0)
            compression = _compression(path, head)
            if compression == GZIP:
                file = opened.enter_context(gzip.open(raw))
                head = file.peek(HEAD_BYTES)
            elif compression == ZSTD:
                # A reader of the package zstandard takes a file that was cut short for a complete one.
                arrow = import_arrow(path, "zstd")
                damaged = (OSError,)
                file = arrow.CompressedInputStream(raw, "zstd")
                file = opened.enter_context(io.BufferedReader(file, CHUNK_BYTES))
                head = file.peek(HEAD_BYTES)
            _refuse(format_of(head[:HEAD_BYTES]), f"{begin} {'holds' if compression else 'is'}")
            yield file, raw.tell
        except damaged as error:
            words = f"is damaged or cut short ({error}); fetch it again or leave it out"
            raise UserError(f"{begin} {words}") from error
        except OSError as error:
            if isinstance(path, RemoteFile):
                raise
            raise UserError(f"{begin} cannot be read ({error.strerror})") from None


def _open(path: File, begin: str) -> IO[bytes]:
    try:
        return path.open("rb")
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{begin} cannot be read ({error.strerror or error})") from None


def _compression(path: File, head: bytes) -> str | None:
    """The compression that the first bytes tell, or the suffix where they are not text."""
    file_format = format_of(head)
    if file_format is not None:
        return file_format.name if file_format.name in (GZIP, ZSTD) else None
    try:
        head.decode()
    except UnicodeDecodeError as error:
        if error.end < len(head):  # else a character that these bytes cut
            return COMPRESSED.get(path.suffix.lower())
    return None


def _refuse(file_format: Format | None, begin: str) -> None:
    """Raise `UserError` that begins with `begin` for a format that has a name."""
    if file_format is not None:
        raise UserError(
            f"{begin} {file_format.name}, which is not read as it is; {file_format.fix}"
        )


def import_arrow(path: File, purpose: str) -> Any:
    """Import pyarrow with its Parquet reader; `UserError` with the extra to install."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        fix = f"{purpose} needs pyarrow; pip install 'ultrascale_jax[data]'"
        raise UserError(f"{begin_of(path)} {fix}") from error
    return pyarrow


def read_text(path: File, field: str) -> Iterator[tuple[str, int]]:
    """The file as one document, and the bytes read so far."""
    if table := TABLES.get(kind_of(path)):
        _refuse(Format(table, ROWS), f"{begin_of(path)} is")
    yield whole_text(path, field, begin_of(path))


def whole_text(path: File, field: str, begin: str) -> tuple[str, int]:
    """Return the text of a file and its bytes; errors begin with `begin`.

    Raises `UserError` for text in another encoding than UTF-8, and for JSON lines that hold `field`.
    """
    with open_input(path, begin) as (file, done):
        content = file.read()
        try:
            text = utf8(content)
        except UserError as error:
            raise UserError(f"{begin} {error}, or leave it out") from None
        if (place := text.find("\0")) >= 0:
            fix = f"has a NUL character at {place}, as UTF-16 and binary files do; leave it out"
            raise UserError(f"{begin} {fix}")
        if text[:1] == "{" and _are_rows(text.split("\n", 2)[:2], field):
            fix = (
                "holds JSON lines; give it a name that ends in .jsonl, and make token shards of it"
            )
            raise UserError(f"{begin} {fix} (ultrascale prepare-data)")
        return text, done()


def _are_rows(lines: list[str], field: str) -> bool:
    """Whether the first two lines of a text are JSON objects, or the first is one with a text in `field`."""
    try:
        rows = [json.loads(line) for line in lines if line.lstrip().startswith("{")]
    except (ValueError, RecursionError):
        return False
    return len(rows) == 2 or any(isinstance(row.get(field), str) for row in rows[:1])


def read_rows(path: File) -> Iterator[tuple[int, Any, int]]:
    """The number of every line that is not blank, its JSON, and the bytes read so far."""
    begin, first = begin_of(path), True
    with open_input(path) as (file, done):
        for number, line in enumerate(file, start=1):
            if not line.removeprefix(codecs.BOM_UTF8).strip():
                continue
            try:
                row = parse_json(line, f"{begin} line {number}")
            except UserError:
                if first:
                    _refuse(form_of_line(line), f"{begin} looks like")
                raise
            if first and (row == [] or is_messages(row)):
                _refuse(form_of_line(line), f"{begin} looks like")
            first = False
            yield number, row, done()


def read_json_lines(path: File, field: str) -> Iterator[tuple[str, int]]:
    """The text of every line's object, and the bytes read so far."""
    for number, document, done in read_rows(path):
        yield text_of(document, field, f"{begin_of(path)} line {number}"), done


def text_of(document: Any, field: str, where: str) -> str:
    """The text of a document's field; `UserError` that begins with `where` if it has none."""
    if not isinstance(document, dict):
        raise UserError(f"{where} has no text in {field!r}: it is {_kind(document)}, no object")
    text = document.get(field)
    if isinstance(text, str):
        return whole_characters(text)
    if kind := kind_of_row(document):
        name = "a conversation" if kind == "chat" else "a preference pair"
        fix = f"give such rows separately from text, with --{kind}"
        raise UserError(f"{where} has {name}, no text in {field!r}; {fix}")
    names = [name for name, value in document.items() if isinstance(value, str)]
    listed = [name for name, value in document.items() if is_messages(value)]
    way = f"write the objects of a list one a line: jq -c '.{listed[0]}[]'" if listed else ""
    if field in document:
        has, fix = f", which is {_kind(text)}", "write text there, or leave the row out"
        fix += f", or give another --text-field of {names}" if names else ""
    elif names:
        has, fix = f" but in {names}", "give another --text-field" + (f", or {way}" if way else "")
    elif way:
        has, fix = f" nor another text, but lists in {listed}", way
    else:
        has, fix = f" nor another text, but {list(document)}", "write objects with a text"
    raise UserError(f"{where} has no text in {field!r}{has}; {fix}")


def _kind(value: Any) -> str:
    """The kind of a value of JSON that is no text."""
    kinds = {type(None): "null", bool: "a boolean", list: "a list", dict: "an object", str: "text"}
    return kinds.get(type(value), "a number")


def whole_characters(text: str) -> str:
    """The text with `?` for half a surrogate pair, which JSON can hold and is no character."""
    return text.encode(errors="replace").decode()


def read_parquet(path: File, field: str) -> Iterator[tuple[str, int]]:
    """The text of every row, and about how many bytes were read so far."""
    for number, row, done in read_parquet_rows(path, field):
        fix = f"row {number} has no text in {field!r}, which is null; leave such rows out"
        require(row[field] is not None, "input", str(path), fix)
        yield row[field], done


def read_parquet_rows(path: File, field: str | None = None) -> Iterator[tuple[int, Any, int]]:
    """The number of every row, its columns, or `field` of text alone, and about how many bytes were read so far."""
    pyarrow = import_arrow(path, "Parquet")
    size, number, begin = path.stat().st_size, 0, begin_of(path)
    # With `pre_buffer`, its default, it would keep all bytes of the file.
    bounded = {"pre_buffer": False, "buffer_size": CHUNK_BYTES}
    with _open(path, begin) as raw:
        file_format = format_of(raw.read(HEAD_BYTES))
        if file_format is not None and file_format.name != PARQUET:
            _refuse(file_format, f"{begin} is")
        raw.seek(0)
        try:
            with pyarrow.parquet.ParquetFile(raw, **bounded) as file:
                if field is not None:
                    _check_column(file.schema_arrow, field, path)
                total, columns = file.metadata.num_rows, None if field is None else [field]
                for batch in file.iter_batches(batch_size=128, columns=columns):
                    for row in batch.to_pylist():
                        number += 1
                        yield number, row, size * number // total
        except UnicodeDecodeError as error:
            fix = (
                f"has text that is not UTF-8 in the {number + 1}th row or soon after; write it anew"
            )
            raise UserError(f"{begin} {fix}") from error
        except (OSError, pyarrow.ArrowException) as error:
            words = " ".join(str(error).split())
            raise UserError(f"{begin} is not Parquet, or damaged ({words})") from error


def _check_column(schema: Any, field: str, path: File) -> None:
    """Refuse a Parquet file whose column `field` is missing, or of another type than text."""
    from pyarrow import types

    def is_text(kind: Any) -> bool:
        kind = kind.value_type if types.is_dictionary(kind) else kind
        return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)

    names = schema.names
    fix = f"has no column {field!r} but {names}; give another --text-field"
    require(field in names, "input", str(path), fix)
    fix = f"has {names.count(field)} columns {field!r}; leave one"
    require(names.count(field) == 1, "input", str(path), fix)
    kind, texts = schema.field(field).type, [one.name for one in schema if is_text(one.type)]
    fix = "cast it to string" if "binary" in str(kind) else "write it as text"
    fix = f"give another --text-field of {texts}, or {fix}" if texts else fix
    require(is_text(kind), "input", str(path), f"has {kind}, not text, in {field!r}; {fix}")
