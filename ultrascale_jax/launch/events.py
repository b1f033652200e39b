"""Record a run in `events.jsonl`, to which all its processes and their supervisor append.

An event is one line of JSON, written by one call to a file opened for appending, so that lines of many writers never
mix on a local disk. On NFS one of two hosts that write in the same moment may overwrite the other's line. No error here
stops a run: the writer reports on stderr an event that it cannot write, and readers skip lines that are damaged.
"""

import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TypeGuard

FILE_NAME = "events.jsonl"

ATTEMPT = "ULTRASCALE_ATTEMPT"
"""Environment variable that tells processes how often their supervisor has restarted them."""


LARGEST = sys.float_info.max

UNREADABLE = (ValueError, RecursionError)
"""Exceptions of `json.loads`, also for integers of more than 4,300 digits and for brackets without end."""


def is_supervised(environ: Mapping[str, str]) -> bool:
    """Return whether a supervisor started this process, and would start it again."""
    return ATTEMPT in environ


class Events:
    """Writer of one process's events; any thread may use it."""

    def __init__(self, run_dir: Path, rank: int | None):
        """Append to `run_dir/events.jsonl` as process `rank`, or as the supervisor of this host (none)."""
        self.path = Path(run_dir) / FILE_NAME
        self.rank = rank
        self.attempt = int(os.environ.get(ATTEMPT, "0"))

    def check(self) -> None:
        """Raise `PermissionError` if the file is not this user's to write; other faults stop no run."""
        try:
            os.close(os.open(self.path, os.O_WRONLY | os.O_APPEND))
        except PermissionError:
            raise
        except OSError:
            return

    def record(self, kind: str, **details: object) -> None:
        """Append one event: rank and time, then `details`."""
        row = {
            "time": time.time(),
            "kind": kind,
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "attempt": self.attempt,
        }
        line = (to_json(row | details) + "\n").encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(file, line)
            finally:
                os.close(file)
        except OSError as error:
            say(f"event {kind} was not written to {self.path}: {error}", sys.stderr)


def say(text: str, file: IO[str] | None = None) -> None:
    """Print one line to `file`, or stdout, at once, with escapes for signs that it has not; drop it if that fails."""
    stream = sys.stdout if file is None else file
    encoding = getattr(stream, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError, ValueError):  # a full disk, a closed pipe; a closed file
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def read_events(path: Path) -> list[dict]:
    """Return the events of a file, or of a run directory, in order; says on stderr if it cannot be read."""
    path = Path(path)
    try:
        path = path / FILE_NAME if path.is_dir() else path
        lines = path.read_bytes().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        say(f"{path} cannot be read: {error}", sys.stderr)
        return []
    rows = map(parse_object, lines)
    return [row for row in rows if is_number(row.get("time")) and isinstance(row.get("kind"), str)]


def parse_object(line: str | bytes) -> dict:
    """Return the object in a line of JSON; empty if it holds none."""
    try:
        row = json.loads(line)
    except UNREADABLE:
        return {}
    return row if isinstance(row, dict) else {}


def to_json(row: Mapping[str, object]) -> str:
    """Return `row` as one line of strict JSON; numbers that are not finite become null, keys with None are left out."""
    kept = {name: finite(value) for name, value in row.items() if value is not None}
    return json.dumps(kept, allow_nan=False, default=str)


def finite(value: object) -> object:
    """Return `value` with null in place of numbers that are not finite, which JSON cannot express."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value`, read from a file, is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -LARGEST <= value <= LARGEST


def is_count(value: object) -> TypeGuard[int]:
    """Return whether `value` is an integer that a process can have counted to."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def printable(value: object, longest: int = 200) -> str:
    """Return foreign text for a terminal: one line, at most `longest` characters, control characters escaped."""
    text = str(value)[:longest]
    return text if text.isprintable() else ascii(text)[1:-1][:longest]
