"""Name the files of a run directory, and write one atomically."""

import os
from pathlib import Path

METRICS = "metrics.jsonl"
"""The file of a run's metrics, in its run directory."""
CHECKPOINTS = "checkpoints"
"""The folder of its checkpoints there."""


def checkpoints_of(run_dir: str | Path) -> Path:
    """Return the folder of a run's checkpoints, an absolute path as Orbax requires."""
    return Path(run_dir).resolve() / CHECKPOINTS


def write_atomic(path: Path, *contents: bytes | memoryview) -> None:
    """Write a file of these parts atomically: a crash leaves the old one or the new one."""
    unfinished = path.with_name(path.name + ".tmp")
    with open(unfinished, "wb") as file:
        for content in contents:
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
