"""Name the format of a file by its first bytes, and say how its text becomes one that is read."""

import re
from typing import NamedTuple

from ultrascale_jax.storage.foreign import encoding_of

HEAD_BYTES = 512
"""First bytes of a file that tell its format; the mark of a tar archive is at byte 257."""


class Format(NamedTuple):
    """A format that is not text."""

    name: str
    fix: str
    """How its content becomes text, JSON lines or Parquet."""


DECOMPRESS = "decompress it, or compress it by gzip or zstd"
UNPACK = "unpack it, and give the files that were in it"
ROWS = "write its rows as Parquet or JSON lines"
TEXT = "write its text as .txt or JSON lines"

GZIP, ZSTD, PARQUET = "gzip", "Zstandard", "Parquet"

MARKS = {
    Format(GZIP, "decompress it"): rb"\x1f\x8b",
    Format(ZSTD, "decompress it"): rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
    Format("bzip2", DECOMPRESS): rb"BZh[1-9]",
    Format("xz", DECOMPRESS): rb"\xfd7zXZ\0",
    Format("LZMA", DECOMPRESS): rb"\x5d\0\0|LZIP\x01",
    Format("LZ4", DECOMPRESS): rb"\x04\x22\x4d\x18",
    Format("Snappy", DECOMPRESS): rb"\xff\x06\0\0sNaPpY",
    Format("compress's", DECOMPRESS): rb"\x1f\x9d",
    Format("a zip archive", UNPACK): rb"PK(?:\x03\x04|\x05\x06|\x07\x08)",
    Format("a 7-Zip archive", UNPACK): rb"7z\xbc\xaf\x27\x1c",
    Format("a RAR archive", UNPACK): rb"Rar!\x1a\x07",
    Format("a tar archive", UNPACK): rb".{257}ustar",
    Format("Arrow", ROWS): rb"ARROW1|FEA1|\xff\xff\xff\xff..\0\0",
    Format(PARQUET, "give it a name that ends in .parquet"): rb"PAR[1E]",
    Format("ORC", ROWS): rb"ORC.{0,8}[\0-\x08\x0e-\x1f]",
    Format("Avro", ROWS): rb"Obj\x01",
    Format("a SQLite database", ROWS): rb"SQLite format 3\0",
    Format("HDF5", ROWS): rb"\x89HDF",
    Format("a NumPy array", TEXT): rb"\x93NUMPY",
    Format("a pickle", TEXT): rb"\x80[\x02-\x05]",
    Format("PDF", TEXT): rb"%PDF-",
    Format("an image", "leave it out"): rb"\x89PNG|\xff\xd8\xff|GIF8[79]a",
}
"""Regular expressions of how a format begins."""


def format_of(head: bytes) -> Format | None:
    """Return the format of a file that begins with these bytes; None for UTF-8 text and for one that is not known."""
    if other := encoding_of(head):
        return Format(f"{other} text", f"convert it by iconv -f {other} -t UTF-8")
    return next(
        (file_format for file_format, mark in MARKS.items() if re.match(mark, head, re.DOTALL)),
        None,
    )


def form_of_line(line: bytes) -> Format | None:
    """Return the form of text whose first line, which is no JSON object, is this; None where nothing tells it."""
    line = line.strip()
    if line.startswith(b"["):
        return Format("one JSON array", "write an object a line: jq -c '.[]' FILE > FILE.jsonl")
    if line.startswith(b"{") and line.endswith(b"},"):
        return Format(
            "JSON objects parted by commas", "remove them: sed 's/,$//' FILE > FILE.jsonl"
        )
    if b"}\r{" in line:
        return Format("lines that end in CR", "write LF: tr '\\r' '\\n' < FILE > FILE.jsonl")
    if line == b"{" or (line.startswith(b"{") and line.endswith((b",", b"{", b"["))):
        return Format(
            "JSON over several lines", "write an object a line: jq -c . FILE > FILE.jsonl"
        )
    if line.startswith(b"<"):
        return Format("HTML or XML", TEXT)
    if not line.startswith(b"{") and re.search(rb"[,;\t]", line):
        return Format("CSV", ROWS)
    return None
