"""The lock of a place in object storage, for `launch.run_lock.RunLock`.

It is one object: the text that names the holder, and a second line that each beat replaces. To create it is exclusive
(`If-None-Match: *` of S3, `ifGenerationMatch=0` of Google's storage).
"""

import os

from ultrascale_jax.launch.run_lock import NAME
from ultrascale_jax.storage.remote import Remote

BEAT_S = 20.0
"""Seconds between beats: 4,300 writes a day, which cost cents."""
STALE_S = 120.0
"""Seconds without a beat after which a holder counts as gone; a request may be tried for half of that."""

MOST_BYTES = 1 << 20


class LockObject:
    """A lock at the URL of a folder; its methods raise `RemoteError`."""

    option = "checkpoint.store"

    def __init__(self, url: str):
        self._remote = Remote(url)
        self.guarded = self._remote.url
        self.path = f"{self._remote.url}/{NAME}"

    def create(self, text: str) -> bool:
        # Read first: a server that knows no conditions would overwrite the lock of a job that lives.
        return self.read() is None and self._remote.create(NAME, _with_beat(text))

    def read(self) -> str | None:
        content = self._remote.read(NAME, MOST_BYTES)
        return None if content is None else content.decode(errors="replace").partition("\n")[0]

    def beat_seen(self) -> bytes | None:
        return self._remote.read(NAME, MOST_BYTES)

    def beat(self, text: str) -> None:
        self._remote.write(NAME, _with_beat(text))

    def write(self, text: str) -> None:
        self._remote.write(NAME, _with_beat(text))

    def remove(self) -> None:
        self._remote.remove([NAME])


def _with_beat(text: str) -> bytes:
    return f"{text}\n{os.urandom(8).hex()}\n".encode()
