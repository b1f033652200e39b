"""Keep a folder of object storage for one job at a time, where nothing tells that a holder has died.

The lock is one object: the text that names the holder, and a second line that each beat replaces. To create it is
exclusive (`If-None-Match: *` of S3, `ifGenerationMatch=0` of Google's storage).
"""

import contextlib
import json
import os
import threading
import time

from ultrascale_jax.launch.events import UNREADABLE, is_count, say
from ultrascale_jax.launch.procfs import boot_id, read_stat
from ultrascale_jax.launch.run_lock import NAME, describe_holder, holder_text, refusal
from ultrascale_jax.storage.remote import Remote

BEAT_S = 20.0
"""Seconds between beats: 4,300 writes a day, which cost cents."""
STALE_S = 120.0
"""Seconds without a beat after which a holder counts as gone; a request may be tried for half of that."""
SETTLE_S = 1.0
"""Seconds after a take-over until a second look: longer than another job takes from its last look to its write."""
LEAVE_S = 10.0
"""Seconds that the end of a job waits for silent storage, to remove its lock."""

MOST_BYTES = 1 << 20


class StoreLock:
    """The lock of the folder at a URL, taken by entering it; used by process 0 alone."""

    def __init__(
        self,
        url: str,
        *,
        beat_s: float = BEAT_S,
        stale_s: float = STALE_S,
        settle_s: float = SETTLE_S,
    ):
        self._remote = Remote(url)
        self.path = f"{self._remote.url}/{NAME}"
        self.note: str | None = None
        """A message for the user: whose lock was taken over."""
        self._beat_s, self._stale_s, self._settle_s = beat_s, stale_s, settle_s
        self._own = json.dumps(_identity())
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)

    def __enter__(self) -> "StoreLock":
        """Take the lock. Raises `UserError` that names the holder, if there is one, and `RemoteError`."""
        self._acquire()
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join(timeout=LEAVE_S)

    @property
    def held(self) -> bool:
        """Return whether the lock is still this process's, as far as it can be read now."""
        try:
            found = self._read()
        except OSError:
            return True
        return found is not None and self._is_own(found)

    def _create(self) -> bool:
        # Read first: a server that knows no conditions would overwrite the lock of a job that lives.
        return self._read() is None and self._remote.create(NAME, _with_beat(self._own))

    def _read(self) -> str | None:
        content = self._content()
        return None if content is None else content.decode(errors="replace").partition("\n")[0]

    def _content(self) -> bytes | None:
        return self._remote.read(NAME, MOST_BYTES)

    def _write(self) -> None:
        self._remote.write(NAME, _with_beat(self._own))

    def _acquire(self) -> None:
        while not self._create():
            found = self._read()
            why = "" if found is None else self._why_dead(found)
            if found is None or self._read() != found:
                continue
            self._write()
            time.sleep(self._settle_s)
            if self._read() != self._own:
                continue  # another took it over as well
            self.note = f"took over the lock of {describe_holder(found)}: {why}"
            return

    def _why_dead(self, found: str) -> str:
        """Return why the holder counts as dead. Raises `UserError` if it is alive."""
        alive = refusal(
            f"{self._remote.url} is in use by {describe_holder(found)}; stop that job, or choose another "
            "checkpoint.store"
        )
        holder, own = _parse(found), _identity()
        if holder is not None and holder["machine"] == own["machine"] is not None:
            # The same number at another time is another process.
            if holder["birth"] is not None and _birth(holder["pid"]) == holder["birth"]:
                raise alive
            return "its process is gone"
        say(f"waiting up to {self._stale_s:g} s to see if {describe_holder(found)} is alive")
        before, until = self._content(), time.monotonic() + self._stale_s
        while time.monotonic() < until:
            time.sleep(min(1.0, self._beat_s / 2, self._stale_s / 4))
            if self._read() != found:
                return "it was released"
            if self._content() != before:
                raise alive
        return f"no sign of life for {self._stale_s:g} s"

    def _beat(self) -> None:
        """Run in a thread, as storage may not answer: keep the lock, and release it at the end."""
        while not self._done.wait(self._beat_s):
            # Storage that fails now may not do so next time.
            with contextlib.suppress(OSError):
                found = self._read()
                if found == self._own:
                    self._write()
                elif found is not None and self._is_own(found):
                    say(f"{self.path} was damaged; it is written anew")
                    self._write()
        with contextlib.suppress(OSError):
            found = self._read()
            if found is not None and self._is_own(found):
                self._remote.remove([NAME])

    def _is_own(self, found: str) -> bool:
        """Return whether the lock names this process, or nobody because it is damaged."""
        return found == self._own or _parse(found) is None


def _with_beat(text: str) -> bytes:
    return f"{text}\n{os.urandom(8).hex()}\n".encode()


def _identity() -> dict:
    """Return what identifies this process among all others of all machines."""
    machine = None
    with contextlib.suppress(OSError):
        # Process numbers mean the same in one container of a machine that was not switched off in between.
        namespace = os.readlink("/proc/self/ns/pid")
        machine = None if (boot := boot_id()) is None else f"{boot} {namespace}"
    return {
        **json.loads(holder_text()),
        "birth": _birth(os.getpid()),
        "machine": machine,
        "token": os.urandom(8).hex(),
    }


def _birth(pid: int) -> int | None:
    """Return when a process of this machine began, in ticks; none: it does not run (any more)."""
    stat = read_stat(pid)
    return stat.start_ticks if stat is not None and stat.is_alive else None


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
