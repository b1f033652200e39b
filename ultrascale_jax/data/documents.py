"""Read documents from files, also of object storage: text, JSON lines (also compressed), Parquet and ArrayRecord.

Every reader yields a document and about how many bytes of the file were read so far, and holds a part of the file at
a time. A fault raises `UserError` that names the file and the place.
"""

import contextlib
import functools
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ultrascale_jax.config import UserError, require
from ultrascale_jax.config.foreign import parse_json
from ultrascale_jax.data.conversations import kind_of_row
from ultrascale_jax.data.hub import HubDataset
from ultrascale_jax.storage.remote import RemoteFile

File = Path | RemoteFile
"""A file of documents: on a disk or in object storage."""

Input = File | HubDataset
"""Source of documents."""

JSON_LINES = (".jsonl", ".ndjson", ".json")
COMPRESSED = (".gz", ".zst")

CHUNK_BYTES = 1 << 20
"""Bytes that are read at once."""

EXAMPLE = """
name: "example.proto"
message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: "Features" } }
message_type { name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Entry" } }
message_type { name: "Entry" field { name: "key" number: 1 type: TYPE_STRING }
  field { name: "value" number: 2 type: TYPE_MESSAGE type_name: "Feature" } }
message_type { name: "Feature" field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: "BytesList" } }
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
"""
"""The parts of tensorflow/core/example/{example,feature}.proto that can hold text."""


def read_file(path: File, field: str) -> Iterator[tuple[str, int]]:
    """The documents of a file in the form that its suffix tells; `field` holds their text."""
    readers = dict.fromkeys(JSON_LINES, read_json_lines)
    readers |= {".parquet": read_parquet, ".array_record": read_array_record}
    return readers.get(kind_of(path), read_text)(path, field)


def kind_of(path: Input) -> str:
    """The suffix that tells the form of a file, below that of compression."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


@contextlib.contextmanager
def open_input(path: File) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Open a file, decompressed, and a function that tells how many of its own bytes were read so far.

    Raises `UserError` inside the block for a compressed file that is damaged or cut short.
    """
    with path.open("rb") as raw, contextlib.ExitStack() as opened:
        file: Any = raw
        damaged: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
        if path.suffix == ".gz":
            file = opened.enter_context(gzip.open(raw))
        elif path.suffix == ".zst":
            # Of the package zstandard a reader takes a file that was cut short for whole.
            arrow = import_arrow(path, "zstd")
            damaged = (OSError,)
            file = arrow.CompressedInputStream(raw, "zstd")
            file = opened.enter_context(io.BufferedReader(file, CHUNK_BYTES))
        try:
            yield file, raw.tell
        except damaged as error:
            words = f"is damaged or cut short ({error}); fetch it again or leave it out"
            raise UserError(f"input={str(path)!r}: {words}") from error


def import_arrow(path: File, what: str) -> Any:
    """Import pyarrow with its Parquet reader; `UserError` with the extra to install."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        fix = f"{what} needs pyarrow; pip install 'ultrascale_jax[data]'"
        raise UserError(f"input={str(path)!r}: {fix}") from error
    return pyarrow


def read_text(path: File, field: str) -> Iterator[tuple[str, int]]:
    """The whole file as one document, and the bytes read so far."""
    del field
    try:
        with open_input(path) as (file, done):
            yield file.read().decode(), done()
    except UnicodeDecodeError as error:
        fix = "is not UTF-8 text; convert it or leave it out"
        raise UserError(f"input={str(path)!r}: {fix}") from error


def read_rows(path: File) -> Iterator[tuple[int, Any, int]]:
    """The number of every line that is not blank, its JSON, and the bytes read so far."""
    with open_input(path) as (file, done):
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, parse_json(line, f"input={str(path)!r}: line {number}"), done()


def read_json_lines(path: File, field: str) -> Iterator[tuple[str, int]]:
    """The text of every line's object, and the bytes read so far."""
    for number, document, done in read_rows(path):
        yield text_of(document, field, f"input={str(path)!r}: line {number}"), done


def text_of(document: Any, field: str, where: str) -> str:
    """The text of a document's field; `UserError` that begins with `where` if it has none."""
    text = document.get(field) if isinstance(document, dict) else None
    if not isinstance(text, str):
        fields = document.items() if isinstance(document, dict) else ()
        names = [name for name, value in fields if isinstance(value, str)]
        has = f"no text in {field!r} but in {names}" if names else f"no text in {field!r}"
        fix = "give another --text-field"
        if kind := kind_of_row(document):
            has = f"{'a conversation' if kind == 'chat' else 'a preference pair'}, no text in {field!r}"
            fix = f"give such rows apart from text, with --{kind}"
        raise UserError(f"{where} has {has}; {fix}")
    return whole_characters(text)


def whole_characters(text: str) -> str:
    """The text with `?` for half a surrogate pair, which JSON can hold and is no character."""
    return text.encode(errors="replace").decode()


def read_parquet(path: File, field: str) -> Iterator[tuple[str, int]]:
    """The text of every row, and about how many bytes were read so far."""
    for number, row, done in read_parquet_rows(path, field):
        fix = f"row {number} has no text in {field!r}; give another --text-field"
        require(isinstance(row[field], str), "input", str(path), fix)
        yield row[field], done


def read_parquet_rows(path: File, field: str | None = None) -> Iterator[tuple[int, Any, int]]:
    """The number of every row, its columns, or `field` alone, and about how many bytes were read so far."""
    pyarrow = import_arrow(path, "Parquet")
    size, number = path.stat().st_size, 0
    # With `pre_buffer`, its default, it would keep the bytes of the whole file.
    bounded = {"pre_buffer": False, "buffer_size": CHUNK_BYTES}
    try:
        with path.open("rb") as raw, pyarrow.parquet.ParquetFile(raw, **bounded) as file:
            names, total = file.schema_arrow.names, file.metadata.num_rows
            fix = f"has no column {field!r} but {names}; give another --text-field"
            require(field is None or field in names, "input", str(path), fix)
            columns = None if field is None else [field]
            for batch in file.iter_batches(batch_size=128, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row, size * number // total
    except (OSError, pyarrow.ArrowException) as error:
        words = " ".join(str(error).split())
        raise UserError(f"input={str(path)!r}: is not Parquet, or damaged ({words})") from error


def read_array_record(path: File, field: str) -> Iterator[tuple[str, int]]:
    """The text of every record: a JSON object, or a tf.train.Example as TensorFlow Datasets write them."""
    from array_record.python import array_record_module

    fix = "ArrayRecord is read from a disk; download the file first"
    require(not isinstance(path, RemoteFile), "input", str(path), fix)
    size, where = path.stat().st_size, f"input={str(path)!r}: record"
    try:
        reader = array_record_module.ArrayRecordReader(str(path))
        count = reader.num_records()
        for first in range(0, count, 1024):
            records = reader.read(range(first, min(first + 1024, count)))
            for number, record in enumerate(records, start=first + 1):
                has = f"{where} {number}"
                document = parse_json(record, has) if record[:1] == b"{" else parse_example(record)
                yield text_of(document, field, has), size * number // count
        reader.close()  # one that could not open the file would raise here again
    except (RuntimeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        words = " ".join(str(error).split())
        raise UserError(f"input={str(path)!r}: is no ArrayRecord, or damaged ({words})") from error


@functools.cache
def _example() -> tuple[Any, type[Exception]]:
    """The message class tf.train.Example, and the error of bytes that are none."""
    from google.protobuf import (
        descriptor_pb2,
        descriptor_pool,
        message,
        message_factory,
        text_format,
    )

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))
    return kind, message.DecodeError


def parse_example(record: bytes) -> dict[str, str]:
    """The features of a tf.train.Example that hold one text; `ValueError` for bytes of another message."""
    kind, damaged = _example()
    try:
        features = kind.FromString(record).features.feature
    except damaged as error:
        raise ValueError("a record is neither JSON nor a tf.train.Example") from error
    lists = ((entry.key, entry.value.bytes_list.value) for entry in features)
    return {key: values[0].decode(errors="replace") for key, values in lists if len(values) == 1}
