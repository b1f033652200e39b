"""Exchange messages between the processes of a job; every process must call them, because each call waits for all."""

import json
import socket
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

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


def agree(problem: str | None) -> str | None:
    """Return the problem of the first process that has one."""
    return next((words for words in gather(problem) if words), None)


def hosts() -> list[str]:
    """Return the host of each process."""
    return gather(socket.gethostname())
