"""Open the files of a run directory: regular files only, never through a symbolic link, never waiting for a writer.

In a run directory that was unpacked, copied or shared, a link may lead a write out of it, and a FIFO may block `open`
before any watchdog runs. The run directory itself may be a link, because its user names it.
"""

import errno
import os
import stat
from pathlib import Path

from ultrascale_jax.config import UserError

METRICS = "metrics.jsonl"
"""The file of a run's metrics, in its run directory."""
CHECKPOINTS = "checkpoints"
"""The folder of its checkpoints there."""
LINK, NO_FILE, NO_FOLDER = "is a symbolic link", "is not a regular file", "is not a folder"


class NotRegular(UserError, OSError):
    """Another kind of file is in place of a regular file or a folder; `strerror` names it."""

    def __init__(self, number: int, fault: str, path: Path | str):
        super().__init__(number, fault)
        self.errno, self.strerror, self.filename = number, fault, str(path)

    def __str__(self) -> str:
        fix = "; a run follows none inside its run directory: remove it, or make the whole run directory a link"
        return f"{self.filename} {self.strerror}{fix if self.strerror == LINK else ''}"


def open_regular(path: Path | str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file without waiting and return its descriptor; also an `opener` for `open`.

    Raises `NotRegular` for a link, FIFO, device, socket or folder, or `OSError` as `os.open`.
    """
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
    try:
        file = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotRegular(errno.ELOOP, LINK, path) from None
        if error.errno in (errno.ENXIO, errno.EISDIR):
            raise NotRegular(errno.ENXIO, NO_FILE, path) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise NotRegular(errno.ENXIO, NO_FILE, path)
    os.set_blocking(file, True)
    return file


def read_regular(path: Path | str) -> bytes:
    """Read a file. Raises as `open_regular`."""
    with open(path, "rb", opener=open_regular) as file:
        return file.read()


def write_atomic(path: Path, *contents: bytes | memoryview) -> None:
    """Write a file of these parts atomically: a crash leaves the old one or the new one.

    A link at `path` or `path.tmp` is replaced.
    """
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.unlink(missing_ok=True)
    with open(unfinished, "xb", opener=open_regular) as file:
        for content in contents:
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def folder_of(run_dir: Path, name: str, *, make: bool = True) -> Path:
    """Return the folder `name`, such as `a/b`, of a run directory; without `make` it may be missing.

    Raises `NotRegular` where a part of `name` is a link or no folder.
    """
    folder = Path(run_dir)
    if make:
        folder.mkdir(parents=True, exist_ok=True)
    for part in Path(name).parts:
        folder /= part
        if make and not os.path.lexists(folder):
            folder.mkdir(exist_ok=True)
        if os.path.islink(folder):
            raise NotRegular(errno.ELOOP, LINK, folder)
        if os.path.lexists(folder) and not os.path.isdir(folder):
            raise NotRegular(errno.ENOTDIR, NO_FOLDER, folder)
    return folder
