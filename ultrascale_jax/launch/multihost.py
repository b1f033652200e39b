"""Exchange messages between the processes of a job; every process must call them, because each call waits for all."""

import json
import socket
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ultrascale_jax.config import UserError
from ultrascale_jax.launch.failures import Damaged, NotNow, denied

BLOCK = 512
"""Messages are padded to a multiple of so many bytes."""


def gather(value: Any) -> list:
    """Return `value` of every process, in their order; it must survive JSON."""
    if jax.process_count() == 1:
        return [value]
    data = json.dumps(value).encode()
    longest = int(np.max(multihost_utils.process_allgather(np.int32(len(data)))))
    rows = multihost_utils.process_allgather(_padded(data, longest))
    return [json.loads(row.tobytes()) for row in rows]


def broadcast_from_process0(value: Any) -> Any:
    """Return `value` of process 0 on all processes; it must survive JSON."""
    if jax.process_count() == 1:
        return value
    data = json.dumps(value).encode() if jax.process_index() == 0 else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    row = multihost_utils.broadcast_one_to_all(_padded(data, size))
    return json.loads(np.asarray(row, np.uint8).tobytes())


def _padded(data: bytes, size: int) -> np.ndarray:
    """Pad `data` with blanks, uint8, at least [size]: to few sizes, because XLA compiles a program for each."""
    return np.frombuffer(data.ljust(-(-size // BLOCK) * BLOCK), np.uint8)


def agree[Problem](problem: Problem | None) -> Problem | None:
    """Return the problem of the first process that has one; it must survive JSON."""
    return next((words for words in gather(problem) if words), None)


def on_all[Value](do: Callable[[], Value]) -> Value:
    """Return `do()` of each process, or raise on all the error of the first that has one.

    A `UserError` becomes the kind that has its exit code: `Damaged`, `NotNow` or `UserError` itself. An `OSError`
    becomes `NotNow`, or `UserError` where a file may not be used.
    """
    values: list[Value] = []
    problem: UserError | None = None
    try:
        values.append(do())
    except UserError as error:
        problem = error
    except OSError as error:
        problem = denied(error) or _unreadable(error)
    fault = agree(None if problem is None else [problem.exit_code, str(problem)])
    if fault is not None:
        code, text = fault
        raise next(kind for kind in (Damaged, NotNow, UserError) if kind.exit_code == code)(text)
    return values[0]


def on_process0[Value](do: Callable[[], Value]) -> Value:
    """Return `do()` of process 0, as JSON carries it, on all; the others may see less, so they do not look.

    Raises on all processes an error of `do`, as `on_all` does.
    """
    return broadcast_from_process0(on_all(do if jax.process_index() == 0 else lambda: None))


def _unreadable(error: OSError) -> NotNow:
    where = f"{error.filename}: " if error.filename else ""
    words = f"{where}cannot be read on {socket.gethostname()} ({error.strerror or error})"
    return NotNow(f"{words}; nothing was renamed, and a restart tries again")


def hosts() -> list[str]:
    """Return the host of each process."""
    return gather(socket.gethostname())
