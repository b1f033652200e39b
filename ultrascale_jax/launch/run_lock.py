"""Keep a run directory for one job at a time: its process 0 holds `flock` on RUN_DIR/lock.

The system releases the lock when the process ends, however it ends; on NFS, whose server keeps such locks, when the
server learns that the host is gone. The text of the file names the holder.
"""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from ultrascale_jax.config import UserError
from ultrascale_jax.launch.events import is_supervised, printable
from ultrascale_jax.launch.failures import NotNow, denied

NAME = "lock"

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of a disk without locks, such as Lustre mounted without `flock`."""


def refusal(text: str) -> UserError:
    """Return the error for a resource that a run cannot use now: `NotNow` if a supervisor can try again later."""
    return NotNow(text) if is_supervised(os.environ) else UserError(text)


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[str | None]:
    """Hold the lock of a run directory inside the block, in process 0 alone; the file stays, empty.

    Yields:
        A line for the user where the disk has no locks, else None.

    Raises:
        UserError: another job holds it, or the file cannot be written.
    """
    path, note = run_dir / NAME, None
    with contextlib.ExitStack() as stack:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path, "a+b", 0))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = printable(file.read(200).decode(errors="replace")) or "another job"
                fix = "stop that job, or choose another log.run_dir"
                raise refusal(f"{run_dir} is in use by {holder}; {fix}") from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                note = f"{path}: this disk has no locks ({error.strerror}); start no second job in this folder"
            file.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
            holder = f"pid {os.getpid()} on {socket.gethostname()} (since {since} UTC)"
            file.write(holder.encode())
        except OSError as error:
            fix = "make the run directory writable, or choose another with log.run_dir"
            raise denied(error) or refusal(f"cannot write {path} ({error}): {fix}") from None
        try:
            yield note
        finally:
            with contextlib.suppress(OSError):
                file.truncate(0)
