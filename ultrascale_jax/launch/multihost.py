"""Messages between the processes of a job. All processes must call them: those that do, wait for the others."""

import json
import socket
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

BLOCK = 512
"""What is told takes a multiple of so many bytes."""


def gather(value: Any) -> list:
    """`value` of every process, in their order; it must survive JSON."""
    if jax.process_count() == 1:
        return [value]
    data = json.dumps(value).encode()
    longest = int(np.max(multihost_utils.process_allgather(np.int32(len(data)))))
    rows = multihost_utils.process_allgather(_padded(data, longest))
    return [json.loads(row.tobytes()) for row in rows]


def broadcast_from_process0(value: Any) -> Any:
    """`value` of process 0, on all; it must survive JSON."""
    if jax.process_count() == 1:
        return value
    data = json.dumps(value).encode() if jax.process_index() == 0 else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    row = multihost_utils.broadcast_one_to_all(_padded(data, size))
    return json.loads(np.asarray(row, np.uint8).tobytes())


def _padded(data: bytes, size: int) -> np.ndarray:
    """`data` and blanks, uint8, at least [size]: of few sizes, as XLA compiles a program for each."""
    return np.frombuffer(data.ljust(-(-size // BLOCK) * BLOCK), np.uint8)


def agree(problem: str | None) -> str | None:
    """The first process's problem of all that have one."""
    return next((words for words in gather(problem) if words), None)


def hosts() -> list[str]:
    """The host of each process."""
    return gather(socket.gethostname())
