"""Admit one job to a run directory: `run_dir/lock` names its holder and shows that it lives.

Where checkpoints have copies in object storage, the same lock is an object there (`storage/lock.py`).

The holder touches the file every `BEAT_S` seconds. A job that finds the file takes it over at once where the holder's
process was on this machine and is gone. Where only the heartbeat can tell (another machine or container, a damaged
lock), it watches the file: a holder that beats meanwhile is alive, one that does not for `STALE_S` seconds is gone. It
compares the file only with itself, so clocks that disagree do no harm. A minute is longer than NFS keeps attributes
(60 s at most, and opening the file asks anew), and short beside the cost of a lost node.

Of several jobs that take a dead holder's lock at once, the last to write has it; all look again a moment later. A
holder that was stopped for longer finds another name in the lock when it wakes: `held` is false, and it must end. The
holder rewrites a damaged lock, which names nobody, at its next beat.
"""

import contextlib
import errno
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Protocol

from ultrascale_jax.config import UserError
from ultrascale_jax.launch.events import UNREADABLE, is_count, is_supervised, printable, say
from ultrascale_jax.launch.exit_codes import CRASHED
from ultrascale_jax.launch.procfs import boot_id, read_stat
from ultrascale_jax.launch.run_files import open_regular

NAME = "lock"
BEAT_S = 5.0
STALE_S = 60.0
SETTLE_S = 1.0
"""Seconds after a take-over until a second look: longer than another job takes from its last look to its write."""

LEAVE_S = 10.0
"""Seconds that the end of a job waits for a silent disk, to remove its lock."""

LASTING = {
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
    *(errno.EROFS, errno.EACCES, errno.EPERM),
}
"""Errors of a folder that last until somebody fixes them."""


class NotNow(UserError):
    """A run directory, or a device, cannot be used at the moment: its disk is full, say, or the last job still ends."""

    exit_code = CRASHED


def refusal(text: str, *, lasting: bool = False) -> UserError:
    """Return the error for what a run cannot use: `NotNow` if time may fix it and a supervisor can try again."""
    return NotNow(text) if is_supervised(os.environ) and not lasting else UserError(text)


class LockPlace(Protocol):
    """The place of a lock; its methods raise `OSError` where that does not answer."""

    @property
    def path(self) -> Path | str:
        """The name of the lock in messages."""
        ...

    @property
    def guarded(self) -> Path | str:
        """The folder or the place that the lock guards."""
        ...

    @property
    def option(self) -> str:
        """The field that names it."""
        ...

    def create(self, text: str) -> bool:
        """Write the lock unless there is one; return whether it was written."""
        ...

    def read(self) -> str | None:
        """Return the text of the lock; None if there is none."""
        ...

    def beat_seen(self) -> object:
        """Return what changes with every beat of the holder."""
        ...

    def beat(self, text: str) -> None:
        """Show that the holder of the lock lives, whose text it is."""
        ...

    def write(self, text: str) -> None:
        """Write the lock, or replace it."""
        ...

    def remove(self) -> None:
        """Remove the lock."""
        ...


class LockFile:
    """A lock in a folder."""

    option = "log.run_dir"

    def __init__(self, folder: Path):
        self.guarded, self.path = folder, folder / NAME

    def create(self, text: str) -> bool:
        self.guarded.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with open(file, "w") as new:
            new.write(text)
        return True

    def read(self) -> str | None:
        return _read(self.path)

    def beat_seen(self) -> int | None:
        return _beat_of(self.path)

    def beat(self, text: str) -> None:
        del text
        os.utime(self.path, follow_symlinks=False)

    def write(self, text: str) -> None:
        mine = self.path.with_name(f"{NAME}.{os.urandom(8).hex()}")
        mine.write_text(text)
        os.replace(mine, self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class RunLock:
    """The lock of one run directory, or of another place, taken by entering it; used by process 0 alone."""

    def __init__(
        self,
        run_dir: Path | LockPlace,
        *,
        beat_s: float = BEAT_S,
        stale_s: float = STALE_S,
        settle_s: float = SETTLE_S,
    ):
        self._place = LockFile(run_dir) if isinstance(run_dir, Path) else run_dir
        self.path = self._place.path
        self.note: str | None = None
        """A message for the user: whose lock was taken over."""
        self._beat_s, self._stale_s, self._settle_s = beat_s, stale_s, settle_s
        self._own = json.dumps(_identity())
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)

    def __enter__(self) -> "RunLock":
        """Take the lock. Raises `UserError` that names the holder, if there is one."""
        try:
            self._acquire()
        except UserError:  # an `OSError` too may be one
            raise
        except OSError as error:
            fix = "make the run directory writable, or choose another with log.run_dir"
            words = f"cannot write {self.path} ({error}): {fix}"
            raise refusal(words, lasting=error.errno in LASTING) from None
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join(timeout=LEAVE_S)

    @property
    def held(self) -> bool:
        """Return whether the lock is still this process's, as far as it can be read now."""
        try:
            found = self._place.read()
        except OSError:
            return True
        return found is not None and self._is_own(found)

    def _acquire(self) -> None:
        while not self._place.create(self._own):
            found = self._place.read()
            why = "" if found is None else self._why_dead(found)
            if found is None or self._place.read() != found:
                continue
            self._place.write(self._own)
            time.sleep(self._settle_s)
            if self._place.read() != self._own:
                continue  # another took it over as well
            self.note = f"took over the lock of {_who(found)}: {why}"
            return

    def _why_dead(self, found: str) -> str:
        """Return why the holder counts as dead. Raises `UserError` if it is alive."""
        alive = refusal(
            f"{self._place.guarded} is in use by {_who(found)}; stop that job, or choose another {self._place.option}"
        )
        holder, own = _parse(found), _identity()
        if holder is not None and holder["machine"] == own["machine"] is not None:
            # The same number at another time is another process.
            if holder["birth"] is not None and _birth(holder["pid"]) == holder["birth"]:
                raise alive
            return "its process is gone"
        say(f"waiting up to {self._stale_s:g} s to see if {_who(found)} is alive")
        before, until = self._place.beat_seen(), time.monotonic() + self._stale_s
        while time.monotonic() < until:
            time.sleep(min(1.0, self._beat_s / 2, self._stale_s / 4))
            if self._place.read() != found:
                return "it was released"
            if self._place.beat_seen() != before:
                raise alive
        return f"no sign of life for {self._stale_s:g} s"

    def _beat(self) -> None:
        """Run in a thread, as the disk may not answer: keep the lock, and release it at the end."""
        while not self._done.wait(self._beat_s):
            # A disk that fails now may not do so next time.
            with contextlib.suppress(OSError):
                found = self._place.read()
                if found == self._own:
                    self._place.beat(self._own)
                elif found is not None and self._is_own(found):
                    say(f"{self.path} was damaged; it is written anew")
                    self._place.write(self._own)
        with contextlib.suppress(OSError):
            found = self._place.read()
            if found is not None and self._is_own(found):
                self._place.remove()

    def _is_own(self, found: str) -> bool:
        """Return whether the lock names this process, or nobody because it is damaged."""
        return found == self._own or _parse(found) is None


def _identity() -> dict:
    """Return what identifies this process among all others of all machines."""
    machine = None
    with contextlib.suppress(OSError):
        # Process numbers mean the same in one container of a machine that was not switched off in between.
        namespace = os.readlink("/proc/self/ns/pid")
        machine = None if (boot := boot_id()) is None else f"{boot} {namespace}"
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "birth": _birth(os.getpid()),
        "machine": machine,
        "token": os.urandom(8).hex(),
    }


def _birth(pid: int) -> int | None:
    """Return when a process of this machine began, in ticks; none: it does not run (any more)."""
    stat = read_stat(pid)
    return stat.start_ticks if stat is not None and stat.is_alive else None


def _read(path: Path) -> str | None:
    """Read the lock's text, through no link."""
    try:
        with open(path, opener=open_regular, errors="replace") as file:
            return file.read(10_000)
    except FileNotFoundError:
        return None


def _beat_of(path: Path) -> int | None:
    try:
        with open(path, opener=open_regular) as file:  # opening asks an NFS server for the newest
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _parse(text: str) -> dict | None:
    """Return the holder that a lock names; none where it is damaged."""
    try:
        holder = json.loads(text)
    except UNREADABLE:
        return None
    if not isinstance(holder, dict):
        return None
    words = all(isinstance(holder.get(name), str) for name in ("host", "started"))
    number, birth = holder.get("pid"), holder.get("birth", "")
    known = is_count(number) and (birth is None or is_count(birth))
    machine = holder.get("machine", 0)
    return holder if words and known and (machine is None or isinstance(machine, str)) else None


def _who(text: str) -> str:
    holder = _parse(text)
    if holder is None:
        return "an unknown job (the lock is damaged)"
    return printable(f"pid {holder['pid']} on {holder['host']} (since {holder['started']} UTC)")
