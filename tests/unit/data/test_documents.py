"""Files of other systems: read, or refused by the name of their format with a fix that mends them."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import pickle
import tarfile
import zipfile

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.orc
import pyarrow.parquet
import pytest

from ultrascale_jax.config import UserError
from ultrascale_jax.data.documents import read_file

ROWS = '{"text": "one"}\n{"text": "tw\u00f6"}\n'
TEXTS = ["one", "tw\u00f6"]
TABLE = pyarrow.table({"text": TEXTS})


def _gzip(content: bytes) -> bytes:
    """Compress without the time, which would be another in each process that collects these tests."""
    return gzip.compress(content, mtime=0)


def texts(path, field="text"):
    return [text for text, _ in read_file(path, field)]


def written(write):
    """Return the bytes that `write` writes to a file."""
    write(file := io.BytesIO())
    return file.getvalue()


def in_zip(file):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.jsonl", ROWS)


def in_tar(file):
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.jsonl"))


PARQUET = written(lambda file: pyarrow.parquet.write_table(TABLE, file))
ZSTD = pyarrow.Codec("zstd").compress(ROWS.encode(), asbytes=True)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bom.jsonl", codecs.BOM_UTF8 + ROWS.encode()),
        ("joined.jsonl", b"".join(codecs.BOM_UTF8 + row for row in ROWS.encode().splitlines(True))),
        ("blank.jsonl", codecs.BOM_UTF8 + b"\r\n" + ROWS.replace("\n", "\r\n").encode()),
        ("bom.jsonl.gz", _gzip(codecs.BOM_UTF8 + ROWS.encode())),
        ("A.Ndjson", ROWS.encode()),
        ("A.JSON.GZ", _gzip(ROWS.encode())),
        ("a.jsonl.zstd", ZSTD),
        ("A.PARQUET", PARQUET),
        # The first bytes tell compression, whatever the name says.
        ("zstd.jsonl.gz", ZSTD),
        ("plain.jsonl.zst", ROWS.encode()),
    ],
)
def test_rows_are_read_whatever_system_wrote_or_named_the_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path / name) == TEXTS


FORMATS = {
    "bzip2": bz2.compress(ROWS.encode()),
    "xz": lzma.compress(ROWS.encode()),
    "LZMA": lzma.compress(ROWS.encode(), lzma.FORMAT_ALONE),
    "a zip archive": written(in_zip),
    "a tar archive": written(in_tar),
    "Arrow": written(lambda file: pyarrow.feather.write_feather(TABLE, file, "uncompressed")),
    "a NumPy array": written(lambda file: np.save(file, np.zeros(3))),
    "a pickle": pickle.dumps(TEXTS),
    "UTF-16 text": ROWS.encode("utf-16"),
}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", PARQUET, "is Parquet, .*; give it a name that ends in .parquet"),
        ("a.parquet", _gzip(PARQUET), "is gzip, .*; decompress it$"),
        ("a.parquet", ROWS.encode(), "is not Parquet, or damaged"),
        ("a.tgz", _gzip(FORMATS["a tar archive"]), "holds a tar archive, .*; unpack it"),
        ("a.jsonl.gz", _gzip(FORMATS["UTF-16 text"]), "holds UTF-16 text, .* -t UTF-8"),
        ("a.txt", b"caf\xe9", r"is not UTF-8 text; convert it, as by iconv .*0xe9 at 3"),
        ("a.json", json.dumps([{"text": "a"}]).encode(), r"one JSON array, .*jq -c '\.\[\]'"),
        ("a.json", b'{"data": [{"text": "a"}]}', r"but lists in \['data'\]; .*jq -c '\.data\[\]'"),
        ("a.jsonl", b"text,label\nhello,1\n", "looks like CSV, .*; write its rows as Parquet"),
        ("a.csv", b"text,label\nhello,1\n", "is CSV, .*; write its rows as Parquet or JSON lines"),
        *(("a.txt", content, kind) for kind, content in FORMATS.items()),
        ("a.txt", ROWS.encode(), "holds JSON lines; give it a name that ends in .jsonl"),
        ("a.jsonl", b'{"a": 1},\n', "JSON objects parted by commas, .*sed 's/,.//' FILE > "),
        ("a.jsonl", b'{"text": null, "id": "a"}', "'text', which is null; .* leave the row out"),
        ("a.jsonl", b'{"text": ["a"], "b": "c"}', r"a list; .*another --text-field of \['b'\]"),
    ],
)
def test_an_input_that_is_not_read_is_told_the_fix_that_mends_it(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^input='{path}': .*{said}") as caught:
        texts(path)
    assert "set_int_max_str_digits" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz", "a.parquet"])
def test_a_file_that_cannot_be_opened_is_one_error(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"{name}': cannot be read .Is a directory"):
        texts(tmp_path / name)


def column(values):
    return pyarrow.table({"text": values, "body": ["a"]})


NOT_UTF8 = [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (column(pyarrow.array([b"a"])), "has binary, not text, in 'text'; .*cast it to string"),
        (
            column(pyarrow.array([7])),
            r"has int64, .*; give another --text-field of \['body'\], or ",
        ),
        (column(pyarrow.array([None], pyarrow.string())), "row 1 has no text in 'text', .* null"),
        (pyarrow.table({"body": ["a"]}), r"has no column 'text' but \['body'\]; give another"),
        (
            pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, ["text"] * 2),
            "has 2 columns 'text'; leave one",
        ),
        (
            column(pyarrow.Array.from_buffers(pyarrow.string(), 1, NOT_UTF8)),
            "has text that is not UTF-8",
        ),
    ],
)
def test_a_column_without_text_is_told_its_type(tmp_path, table, said):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(UserError, match=rf"^input='{path}': {said}"):
        texts(path)


def test_texts_that_begin_like_a_format_are_texts(tmp_path):
    for text in ("ORCHIDS bloom", "PARTS", "[1] a note", '{"a": 1}', "{", "a, b", "<p>", "]"):
        (tmp_path / "a.txt").write_text(text)
        assert texts(tmp_path / "a.txt") == [text]
