"""Write and check a checkpoint's manifest: the names, sizes and SHA-256 of its files.

It is written when the checkpoint is complete, so one without it is not damaged, only unproven: something ended its
writer in the moment between. What a manifest names is compared with the files that are there and never opened by that
name, so it leads nowhere outside its folder.
"""

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ultrascale_jax.config import UserError
from ultrascale_jax.launch.exit_codes import CRASHED, STOPPED
from ultrascale_jax.launch.run_files import open_regular, read_regular, write_atomic

NAME = "manifest.json"
PARTIAL = f"{NAME}.tmp"

MOST_BYTES = 1 << 30
"""Largest manifest that is fetched; a file takes about 150 bytes."""

WORKERS = 8
"""Threads that hash: hashlib lets go of Python's lock, so they run beside each other and beside training."""


class Damaged(UserError):
    """A checkpoint is not what was saved; the message begins with the file or array."""

    exit_code = STOPPED


class Unreadable(UserError):
    """A checkpoint cannot be read now, which proves no damage; a restart may help."""

    exit_code = CRASHED


class Doubtful(Unreadable):
    """A checkpoint without manifest does not load although its files can be read: damage, or a host that fails."""


def files(folder: Path) -> dict[str, int]:
    """Return paths below `folder`, as `a/b`, and their sizes in bytes, in order, without the manifest itself.

    Raises `Damaged` for a link, or anything else that is neither file nor folder.
    """
    found: dict[str, int] = {}
    waiting = [folder]
    while waiting:
        for path in waiting.pop().iterdir():
            name, status = path.relative_to(folder).as_posix(), path.lstat()
            if stat.S_ISDIR(status.st_mode):
                waiting.append(path)
            elif not stat.S_ISREG(status.st_mode):
                kind = "a symbolic link" if path.is_symlink() else "no ordinary file"
                raise Damaged(f"{name} is {kind}")
            elif name not in (NAME, PARTIAL):
                found[name] = status.st_size
    return dict(sorted(found.items()))


def write(folder: Path, hashed: Callable[[], None] = lambda: None) -> tuple[int, float]:
    """Write the manifest of `folder`, all or nothing; returns bytes hashed and seconds taken.

    `hashed` is called after each file.
    """
    begun, sizes = time.monotonic(), files(folder)
    with ThreadPoolExecutor(WORKERS) as pool:
        digests = pool.map(lambda name: _digest(folder / name), sizes)
        entries = {}
        for name, digest in zip(sizes, digests, strict=True):
            entries[name] = [sizes[name], digest]
            hashed()
    text = json.dumps({"files": entries, "sha256": digest_of(entries)}, indent=1) + "\n"
    write_atomic(folder / NAME, text.encode())
    return sum(sizes.values()), time.monotonic() - begun


def check(folder: Path, part: int = 0, of: int = 1, *, contents: bool = True) -> bool:
    """Compare the files of `folder` with its manifest; return False if it has none.

    All names and sizes are compared, and the contents of every `of`-th file from number `part` on: so many processes
    share the work. Without `contents` nothing but the manifest is read.

    Raises:
        Damaged: naming the first file that is not as it was.
        OSError: a file cannot be read, which proves nothing.
    """
    found = files(folder)
    if not (folder / NAME).exists():
        return False
    compare(found, _read(folder / NAME))
    if contents:
        check_contents(folder, part, of)
    return True


def compare(found: dict[str, int], listed: dict[str, list]) -> None:
    """Compare files, sizes in bytes by name, with the entries of a manifest.

    Raises `Damaged`, naming the first file that is not as it was.
    """
    for name in sorted(set(found) | set(listed)):
        if name not in found:
            raise Damaged(f"{name} is missing")
        if name not in listed:
            raise Damaged(f"{name} was not there when it was saved")
        if found[name] != listed[name][0]:
            raise Damaged(f"{name} is {found[name]} bytes long, and was {listed[name][0]}")


def check_contents(folder: Path, part: int = 0, of: int = 1) -> None:
    """Compare the contents of every `of`-th file of the manifest of `folder`, from number `part` on.

    A file that differs is read once more, from the disk, before it is called damaged. Raises as `check`.
    """
    listed = _read(folder / NAME)
    names = sorted(listed, key=lambda name: (-listed[name][0], name))[part::of]
    with ThreadPoolExecutor(WORKERS) as pool:
        digests = pool.map(lambda name: _digest(folder / name), names)
        for name, digest in zip(names, digests, strict=True):
            if digest != listed[name][1] != _digest(folder / name, anew=True):
                raise Damaged(f"{name} has other bytes than were saved (SHA-256)")


def read_all(folder: Path) -> None:
    """Read every file of `folder` from the disk. Raises `OSError` if one cannot be read, and `Damaged` as `files`."""
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda name: _digest(folder / name, anew=True), files(folder)))


def _read(path: Path) -> dict[str, list]:
    """Read the entries of a manifest, `[bytes, SHA-256]` by name."""
    return parse(read_regular(path))


def parse(content: bytes) -> dict[str, list]:
    """Return the entries of a manifest, `[bytes, SHA-256]` by name. Raises `Damaged` if it is not as it was written."""
    try:
        manifest = json.loads(content)
        entries = manifest["files"]
        if manifest["sha256"] == digest_of(entries):
            return entries
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise Damaged(f"{NAME} is not as it was written")


def _digest(path: Path, *, anew: bool = False) -> str:
    # Between the look at the folder and this moment a file may have become a link.
    with open(path, "rb", opener=open_regular) as file:
        if anew:
            # Not from the host's memory, which may be what is wrong.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(value: object) -> str:
    """Return the SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
