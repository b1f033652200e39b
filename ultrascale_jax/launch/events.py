"""The record of a run: `events.jsonl`, to which all its processes and their supervisor append.

An event is one line of JSON, written by one call to a file opened for appending, so that lines of many writers never
mix on a local disk. NFS knows no appending between hosts: of two that write in the same moment one may overwrite the
other's line, which is then lost, and what is left of it is skipped. Nothing here ever stops a run: an event that cannot
be written is told on stderr, and a line that a full disk cut short is left out by readers. The times are of the
writer's clock, which somebody may set, and of its machine's monotonic one, which nobody can (see `now`).
"""

import contextlib
import functools
import json
import math
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TypeGuard

from ultrascale_jax.launch.procfs import boot_id
from ultrascale_jax.launch.run_files import NotRegular, open_regular, read_regular

FILE_NAME = "events.jsonl"

ATTEMPT = "US_ATTEMPT"
"""Environment variable by which a supervisor tells its processes how often they have been started before."""


LARGEST = sys.float_info.max

UNREADABLE = (ValueError, RecursionError)
"""What `json.loads` raises: also for integers of more than 4,300 digits, and for brackets without end."""


def is_supervised(environ: Mapping[str, str]) -> bool:
    """Whether a supervisor started this process, and would start it again."""
    return ATTEMPT in environ


class Events:
    """Writer of one process's events; any thread may use it."""

    def __init__(self, run_dir: Path, rank: int | None):
        """Append to `run_dir/events.jsonl` as process `rank`, or as the supervisor of this host (none)."""
        self.path = Path(run_dir) / FILE_NAME
        self.rank = rank
        self.attempt = int(os.environ.get(ATTEMPT, "0"))

    def check(self) -> None:
        """Raise `NotRegular` if the place of the file is taken by something else; other faults stop no run."""
        try:
            os.close(open_regular(self.path, os.O_WRONLY | os.O_APPEND))
        except NotRegular:
            raise
        except OSError:
            return

    def record(self, kind: str, **details: object) -> None:
        """Append one event: who and when, then `details`."""
        row = {
            **now(),
            "kind": kind,
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "attempt": self.attempt,
        }
        line = (to_json(row | details) + "\n").encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open_regular(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                os.write(file, line)
            finally:
                os.close(file)
        except OSError as error:
            say(f"event {kind} was not written to {self.path}: {error}", sys.stderr)


def now() -> dict[str, float | str]:
    """This moment: in unix seconds, and in seconds since a start of this machine, which `boot` names."""
    return {"time": time.time(), "monotonic": time.monotonic(), "boot": boot()}


@functools.cache
def boot() -> str:
    """Name the start of this machine from which `time.monotonic` counts, alike for all its processes."""
    found = boot_id()
    return socket.gethostname() if found is None else found[:8]


def say(text: str, file: IO[str] | None = None) -> None:
    """Print one line to `file`, or stdout, at once; where nothing can be written, it is left out and stops nothing."""
    with contextlib.suppress(OSError):
        print(text, file=file, flush=True)


def read_events(path: Path) -> list[dict]:
    """Events of a file, or of a run directory, in its order; lines that are no events are left out.

    There are none where the file cannot be read, which is told on stderr.
    """
    path, rows = Path(path), []
    try:
        path = path / FILE_NAME if path.is_dir() else path
        lines = read_regular(path).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        say(f"{path} cannot be read: {error}", sys.stderr)
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except UNREADABLE:
            continue
        if (
            isinstance(row, dict)
            and is_number(row.get("time"))
            and isinstance(row.get("kind"), str)
        ):
            rows.append(row)
    return rows


def read_last(path: Path) -> dict:
    """The last whole row of a file of JSON rows, as `metrics.jsonl`, read from its end; empty if there is none."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 20)))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except UNREADABLE:
            continue
        if isinstance(row, dict):
            return row
    return {}


def to_json(row: Mapping[str, object]) -> str:
    """`row` as one line of strict JSON; numbers that are not finite become null, and None leaves its key out."""
    kept = {name: _finite(value) for name, value in row.items() if value is not None}
    return json.dumps(kept, allow_nan=False, default=str)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value`, which somebody else may have written, is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -LARGEST <= value <= LARGEST


def is_count(value: object) -> TypeGuard[int]:
    """Whether `value` is a whole number that a process can have counted to."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def printable(value: object, longest: int = 200) -> str:
    """Text of others for a terminal: one line, at most `longest` characters, control characters escaped."""
    text = str(value)[:longest]
    return text if text.isprintable() else ascii(text)[1:-1][:longest]
