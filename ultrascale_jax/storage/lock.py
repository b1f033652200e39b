"""Keep a folder of object storage for one job at a time: the object `lock` there names the job that has it.

To create the object is exclusive (`If-None-Match: *` of S3, `ifGenerationMatch=0` of Google's storage). Its holder
writes it again every `BEAT_S` seconds, because nothing tells storage that a holder has died.
"""

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path

from ultrascale_jax.launch.events import parse_object, printable, say
from ultrascale_jax.launch.run_lock import holder_text, refusal
from ultrascale_jax.storage.remote import Remote

NAME = "lock"

BEAT_S = 20.0
"""Seconds between beats: 4,300 writes a day, which cost cents."""
STALE_S = 120.0
"""Seconds without a beat after which a holder counts as gone; a request may be tried for half of that."""
SETTLE_S = 1.0
"""Seconds after a take-over until a second look: longer than another job takes from its last look to its write."""
LEAVE_S = 10.0
"""Seconds that the end of a job waits for silent storage, to remove its lock."""


class StoreLock:
    """The lock of the folder at a URL for the run in `run_dir`, taken by entering it; used by process 0 alone.

    Enter it while holding the lock of `run_dir`, which proves that an earlier holder in the same folder is gone.
    """

    def __init__(
        self, url: str, run_dir: Path, *, beat_s: float = BEAT_S, stale_s: float = STALE_S
    ):
        self._remote = Remote(url)
        self.path = f"{self._remote.url}/{NAME}"
        self.note: str | None = None
        """A message for the user: whose lock was taken over."""
        self._run_dir, self._token = run_dir, os.urandom(8).hex()
        self._beat_s, self._stale_s = beat_s, stale_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)

    def __enter__(self) -> "StoreLock":
        """Take the lock. Raises `UserError` that names the holder, if there is one, and `RemoteError`."""
        # Read first: a server that knows no conditions would overwrite the lock of a job that lives.
        while (content := self._remote.read(NAME)) is not None or not self._remote.create(
            NAME, self._text()
        ):
            if content is None:
                continue
            self._wait_for_death(content)
            self._write()
            time.sleep(min(SETTLE_S, self._stale_s))
            if self.held:  # unless another job took it over in the same moment
                self.note = f"took over {self.path} from {_holder(content)}"
                break
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join(timeout=LEAVE_S)

    @property
    def held(self) -> bool:
        """Return whether the lock is still this process's, as far as it can be read now."""
        try:
            content = self._remote.read(NAME)
        except OSError:
            return True
        return content is not None and _parse(content).get("token") in (self._token, None)

    def _text(self) -> bytes:
        values = {
            "folder": _identity(self._run_dir),
            "holder": f"{holder_text()[:-1]}, {self._run_dir})",
            "token": self._token,
            "beat": time.time(),
        }
        return json.dumps(values).encode()

    def _write(self) -> None:
        self._remote.write(NAME, self._text())

    def _wait_for_death(self, content: bytes) -> None:
        """Return once the holder that `found` names counts as gone. Raises `UserError` if it is alive."""
        if _parse(content).get("folder") == _identity(self._run_dir):
            return
        say(f"waiting up to {self._stale_s:g} s to see if {_holder(content)} is alive")
        until = time.monotonic() + self._stale_s
        while time.monotonic() < until:
            time.sleep(min(1.0, self._stale_s / 4))
            now = self._remote.read(NAME)
            if now is None:
                return
            if now != content:
                raise refusal(
                    f"{self._remote.url} is in use by {_holder(now)}; stop that job, or choose another "
                    "checkpoint.store"
                )

    def _beat(self) -> None:
        """Run in a thread, as storage may not answer: keep the lock, and remove it at the end."""
        while not self._done.wait(self._beat_s):
            # Storage that fails now may not do so next time.
            with contextlib.suppress(OSError):
                if self.held:
                    self._write()
        with contextlib.suppress(OSError):
            if self.held:
                self._remote.remove([NAME])


def _identity(run_dir: Path) -> str:
    """Return an identity of a folder among the folders of all machines, until its machine is switched off."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = socket.gethostname()
    status = run_dir.stat()
    return f"{machine} {status.st_dev}:{status.st_ino}"


def _parse(content: bytes) -> dict:
    return parse_object(content.decode(errors="replace"))


def _holder(content: bytes) -> str:
    """Return the holder that a lock's content names, fit for a terminal."""
    return printable(_parse(content).get("holder", "an unknown job (the lock is damaged)"))
