"""Read files that somebody else wrote: of a bounded size, and JSON as one error where it is none."""

import json
import os
from pathlib import Path
from typing import Any

from ultrascale_jax.config.base import UserError, require

MOST_BYTES = 1 << 24
"""Largest file that is read where a caller names no other bound; the largest `config.json` known has 5 KB."""


def read_foreign(path: Path, *, name: str = "path", most: int = MOST_BYTES) -> bytes:
    """Read a whole regular file of at most `most` bytes; `name` is the field that an error names.

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


def parse_json(content: bytes | str, what: str) -> Any:
    """Parse JSON; an error begins with `what`.

    Raises `UserError` where the text is not UTF-8 or not JSON, is nested too deeply for Python, or holds an integer of
    more digits than Python reads.
    """
    try:
        return json.loads(content.decode() if isinstance(content, bytes) else content)
    except (ValueError, RecursionError) as error:
        # Without Python's advice to programmers, where an integer has too many digits.
        why = str(error).partition("; use sys.")[0]
        raise UserError(f"{what} is not JSON ({why})") from None


def read_json(path: Path, *, name: str = "path", most: int = MOST_BYTES) -> dict[str, Any]:
    """Read the object in a JSON file; as `read_foreign` and `parse_json`."""
    raw = parse_json(read_foreign(path, name=name, most=most), f"{name}={str(path)!r}:")
    require(isinstance(raw, dict), name, str(path), "must hold a JSON object")
    return raw
