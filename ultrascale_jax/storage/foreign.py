"""Read files that somebody else wrote: of a bounded size, as UTF-8, and JSON as one error where it is none."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ultrascale_jax.config.base import UserError, require

type Pairs = Callable[[list[tuple[str, Any]]], Any]

MOST_BYTES = 1 << 24
"""Largest file that is read where a caller names no other bound; the largest `config.json` known has 5 KB."""

ENCODINGS = {
    "UTF-32": rb"\xff\xfe\0\0|\0\0\xfe\xff|(?:[^\0]\0{3}){2}|(?:\0{3}[^\0]){2}",
    "UTF-16": rb"\xff\xfe|\xfe\xff|(?:[^\0]\0){2}|(?:\0[^\0]){2}",
}
"""How text in another encoding than UTF-8 begins: with its byte-order mark, or with two characters of ASCII."""


def read_foreign(path: Path, *, name: str = "path", most: int = MOST_BYTES) -> bytes:
    """Read a regular file of at most `most` bytes; `name` is the field that an error names.

    Raises `UserError` if it is missing, not regular, larger, or cannot be read.
    """
    require(path.exists(), name, str(path), "there is no such file")
    require(path.is_file(), name, str(path), "is not a regular file")
    fix = f"has more than {most:,} bytes, so it is not what it should be"
    try:
        with open(path, "rb") as file:
            require(os.fstat(file.fileno()).st_size <= most, name, str(path), fix)
            content = file.read(most + 1)
    except OSError as error:
        raise UserError(f"{name}={str(path)!r}: cannot be read ({error.strerror})") from None
    require(len(content) <= most, name, str(path), fix)
    return content


def encoding_of(head: bytes) -> str | None:
    """Return the encoding of a text that begins with these bytes; None for UTF-8 and for one that is not known."""
    return next((name for name, begins in ENCODINGS.items() if re.match(begins, head, re.S)), None)


def utf8(content: bytes) -> str:
    """Decode UTF-8, without the byte-order mark that Windows writes.

    Raises `UserError` that names the encoding; its text follows the name of the file.
    """
    other = encoding_of(content)
    try:
        if other is None:
            return content.decode("utf-8-sig")
        command = f"iconv -f {other} -t UTF-8"
    except UnicodeDecodeError as error:
        if (nul := content.find(0)) >= 0:
            raise UserError(f"is not UTF-8 text, but binary (byte 0 at {nul})") from None
        command = f"iconv -f CP1252 -t UTF-8 (byte {content[error.start]:#04x} at {error.start})"
    raise UserError(f"is not UTF-8 text; convert it, as by {command}")


def parse_json(content: bytes | str, source: str, pairs: Pairs | None = None) -> Any:
    """Parse JSON, with or without a byte-order mark; an error begins with `source`. `pairs` builds the objects.

    Raises `UserError` where the text is not UTF-8 or not JSON, is nested too deeply for Python, or holds an integer of
    more digits than Python reads.
    """
    try:
        text = utf8(content) if isinstance(content, bytes) else content.removeprefix("\ufeff")
    except UserError as error:
        raise UserError(f"{source} is not JSON ({error})") from None
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except UserError as error:
        raise UserError(f"{source} {error}") from None
    except (ValueError, RecursionError) as error:
        # Python's message about too many digits also says how a programmer would allow them.
        words = str(error).partition("; use sys.")[0]
        raise UserError(f"{source} is not JSON ({words})") from None


def read_json(
    path: Path,
    *,
    name: str = "path",
    most: int = MOST_BYTES,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Read the object in a JSON file; as `read_foreign` and `parse_json`. `tell` gets each repeated key.

    Raises `UserError` also for a key that has two values.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                both = f"{values[key]!r} and {value!r}"
                if repr(values[key]) != repr(value):
                    raise UserError(f"gives {key!r} two values, {both}; keep one")
                tell(key)
            values[key] = value
        return values

    raw = parse_json(read_foreign(path, name=name, most=most), f"{name}={str(path)!r}:", once)
    require(isinstance(raw, dict), name, str(path), "must hold a JSON object")
    return raw
