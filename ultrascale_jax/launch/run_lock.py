"""Keep a run directory for one job at a time: its process 0 holds `flock` on RUN_DIR/lock.

The system releases the lock when the process ends, however it ends; on NFS, whose server keeps such locks, when the
server learns that the host is gone. The text of the file names the holder.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from ultrascale_jax.config import UserError
from ultrascale_jax.launch.events import is_count, is_supervised, parse_object, printable
from ultrascale_jax.launch.exit_codes import CRASHED

NAME = "lock"

LASTING = {
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
    *(errno.EROFS, errno.EACCES, errno.EPERM),
}
"""Errors of a folder that last until somebody fixes them."""

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of a disk without locks, such as Lustre mounted without `flock`."""


class NotNow(UserError):
    """A run directory, or a device, cannot be used at the moment: its disk is full, say, or the last job still ends."""

    exit_code = CRASHED


def refusal(text: str, *, lasting: bool = False) -> UserError:
    """Return the error for a resource that a run cannot use: `NotNow` if a supervisor can try again later."""
    return NotNow(text) if is_supervised(os.environ) and not lasting else UserError(text)


class RunLock:
    """The lock of one run directory, taken by entering it; used by process 0 alone. The file stays, empty."""

    def __init__(self, run_dir: Path):
        self.path = run_dir / NAME
        self.note: str | None = None
        """A message for the user: that the disk has no locks."""

    def __enter__(self) -> "RunLock":
        """Take the lock. Raises `UserError` that names the holder, if there is one."""
        with contextlib.ExitStack() as stack:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
                stack.callback(os.close, self._file)
                self._lock()
                os.truncate(self._file, 0)
                os.pwrite(self._file, holder_text().encode(), 0)
            except OSError as error:
                fix = "make the run directory writable, or choose another with log.run_dir"
                text = f"cannot write {self.path} ({error}): {fix}"
                raise refusal(text, lasting=error.errno in LASTING) from None
            stack.pop_all()
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(OSError):
            os.truncate(self._file, 0)
        os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = describe_holder(os.pread(self._file, 10_000, 0).decode(errors="replace"))
            text = f"{self.path.parent} is in use by {holder}; stop that job, or choose another log.run_dir"
            raise refusal(text) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self.note = f"{self.path}: this disk has no locks ({error.strerror}); start no second job in this folder"


def holder_text() -> str:
    """Return the line by which a lock names this process."""
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": started})


def describe_holder(text: str) -> str:
    """Return the holder that a lock's text names, fit for a terminal."""
    holder = parse_object(text)
    words = all(isinstance(holder.get(name), str) for name in ("host", "started"))
    if not words or not is_count(holder.get("pid")):
        return "an unknown job (the lock is damaged)"
    return printable(f"pid {holder['pid']} on {holder['host']} (since {holder['started']} UTC)")
