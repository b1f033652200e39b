"""Keep copies of objects on this host, in `$XDG_CACHE_HOME/ultrascale_jax` or `~/.cache/ultrascale_jax`.

A file appears complete or not at all, and is verified before it gets its name. Processes of a host fetch a file once.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ultrascale_jax.config import UserError
from ultrascale_jax.storage.remote import Remote
from ultrascale_jax.units import size

TRIES = 2
"""Downloads of an object before its content counts as wrong."""


class NoCache(UserError, OSError):
    """A folder of the cache cannot be made."""


def cache_folder(*names: str) -> Path:
    """Create and return the folder `names` of the cache. Raises `NoCache`."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(base).joinpath("ultrascale_jax", *names).absolute()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # the second where nobody knows the home folder
        fix = "name a folder that can be written by XDG_CACHE_HOME"
        raise NoCache(f"the cache of this host: cannot be made ({error}); {fix}") from None
    return folder


def name_of(content: str | bytes) -> str:
    """Return the name of a folder for `content`: a part of its SHA-256."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[
        :32
    ]


def write_shared(path: Path, content: bytes) -> None:
    """Write a small file atomically, while other processes may write the same one."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def fetch(remote: Remote, name: str, path: Path, *, size: int, sha256: str) -> None:
    """Fetch the object `name` into the file `path`, unless that exists with `size` bytes.

    Raises `UserError` where the object is not of `size` bytes and `sha256`, and `RemoteError`.
    """
    if _is_there(path, size):
        return
    with exclusive(path):
        if _is_there(path, size):
            return
        partial, fault = path.with_name(f".{path.name}.partial"), ""
        for _ in range(TRIES):
            remote.download(name, partial)
            fault = _fault(partial, size, sha256)
            if not fault:
                os.replace(partial, path)
                return
        partial.unlink()
    raise UserError(f"{remote.url}/{name} {fault}: upload it again")


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Inside, no other process of this host is in a block for `path`."""
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_there(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _fault(path: Path, size: int, sha256: str) -> str:
    """Return how a file differs from this size and digest; empty if it does not."""
    if (actual_size := path.stat().st_size) != size:
        return f"has {actual_size} bytes, not {size}"
    with open(path, "rb") as file:
        same = hashlib.file_digest(file, "sha256").hexdigest() == sha256
    return "" if same else "has other bytes than its index says (SHA-256)"


def require_room(folder: Path, needed: int, purpose: str, fix: str) -> None:
    """Raise `UserError` where the disk of `folder` has no `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{purpose} needs {size(needed)}, but {folder} has {size(free)} free; {fix}"
        )
