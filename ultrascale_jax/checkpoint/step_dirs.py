"""List a run's checkpoints on disk, read their metadata, and rename damaged ones."""

import errno
import glob
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from ultrascale_jax.config import require
from ultrascale_jax.launch.failures import Damaged

METADATA = "_CHECKPOINT_METADATA"
"""The file in which Orbax keeps a checkpoint's JSON."""

CORRUPT = ".corrupt"

DELETED = ".deleted"

PARTIAL = ".orbax-checkpoint-tmp"
"""End of the name of a save that Orbax has not completed."""

STORE = "manifest.ocdbt"
"""The index of the arrays of a group; Orbax writes it last, from the indices of all processes."""

GROUPS = ("params", "train")
"""The groups of arrays of a run's checkpoint."""

PARTS = ("config", "data", "versions", "arrays")
"""The parts of the metadata of a run's checkpoint."""


def check_path(option: str, value: str | Path, *, writes: bool = True) -> None:
    """Raise `UserError` for a folder in which Orbax cannot find its own files or, without `writes`, cannot read.

    TensorStore reads a backslash as a slash, and needs UTF-8. Orbax 0.12 collects the files of a save by a glob whose
    pattern begins with the full path (`merge_ocdbt_per_process_files`), and ignores a save where that finds none.
    """
    try:
        path = os.path.realpath(value)
        usable = os.fsencode(path) == path.encode() and "\\" not in path
    except UnicodeEncodeError:
        path, usable = str(value), False
    usable = usable and not (writes and glob.escape(path) != path)
    letters = "*, ?, [ or \\" if writes else "\\"
    fix = f"Orbax cannot read checkpoints in {path!r}: it needs a locale and a whole path in UTF-8, without {letters}"
    require(usable, option, str(value), f"{fix}; rename the folder, or choose another")


def files(place: Path, groups: Sequence[str] = GROUPS) -> dict[str, int]:
    """Return the files of the checkpoint of these groups at `place`, as `a/b`, and their sizes in bytes, in order.

    Raises `Damaged` where a file is missing without which no reader can find the arrays, and `PermissionError` for one
    that this user may not read.
    """
    sizes: dict[str, int] = {}
    for path in (place, *sorted(place.rglob("*"))):
        mode = os.R_OK | os.X_OK if path.is_dir() else os.R_OK
        if not os.access(path, mode, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        if path.is_file():
            sizes[path.relative_to(place).as_posix()] = path.stat().st_size
    for group in groups:
        if f"{group}/{STORE}" not in sizes:
            raise Damaged(f"{group}/{STORE} is missing")
    return sizes


def steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in `folder`, oldest first."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(entry.name) for entry in entries if is_step(entry.name) and entry.is_dir())


def is_step(name: str) -> bool:
    """Return whether the name of a folder is the number of a step."""
    return name.isascii() and name.isdecimal() and name == str(int(name))


def split_step(name: str, value: str, place: str) -> tuple[str, int | None]:
    """Split `RUN_DIR[@STEP]`, the `place` in the value of the field `name`; a folder whose name ends so is that folder.

    Raises `UserError` where the folder without the step exists too.
    """
    match = re.fullmatch(r"(.+)@(\d{1,9})", place, re.DOTALL)
    if match is None:
        return place, None
    if os.path.isdir(place):
        fix = f"{place} and {match[1]} are both folders; write {place}/ or {match[1]}/@{match[2]}"
        require(not os.path.isdir(match[1]), name, value, fix)
        return place, None
    return match[1], int(match[2])


def quarantined(folder: Path) -> list[str]:
    """Return the names of the damaged checkpoints, as `40.corrupt`."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else ()
    return [entry.name for entry in entries if CORRUPT in entry.name]


def quarantine(place: Path) -> Path:
    """Rename the checkpoint at `place` so that nothing takes it for one; returns its new path."""
    numbered = (f"{place.name}{CORRUPT}.{number}" for number in itertools.count(2))
    return rename_free(place, itertools.chain([f"{place.name}{CORRUPT}"], numbered))


def rename_free(place: Path, names: Iterable[str]) -> Path:
    """Rename a file or folder to the first of `names` that its folder does not have; return its new path."""
    aside = next(path for path in map(place.with_name, names) if not os.path.lexists(path))
    os.rename(place, aside)
    return aside


def remove(place: Path) -> None:
    """Delete the checkpoint at `place`, which is none from the first moment on. Raises `OSError`."""
    deleted = place.with_name(place.name + DELETED)
    os.rename(place, deleted)
    shutil.rmtree(deleted)


def with_digest(meta: dict) -> dict:
    """Add the digest by which `metadata` detects a changed name or value."""
    return meta | {"sha256": _digest(meta)}


def _digest(value: object) -> str:
    """Return the SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def metadata(place: Path, parts: Sequence[str] = PARTS) -> dict:
    """Return the metadata of the checkpoint at `place`, with these parts.

    Raises `Damaged` where that is missing, is not as it was saved or is of another step, and `OSError` where the disk
    fails.
    """
    try:
        meta = json.loads((place / METADATA).read_bytes())["custom_metadata"]
        digest = meta.pop("sha256")
        same = digest == _digest(meta)
        step = meta["data"]["step"]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Damaged(f"{METADATA} is missing ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = str(error).partition("; use sys.")[0]
        raise Damaged(f"{METADATA} cannot be read ({type(error).__name__}: {why})") from None
    if not same:
        raise Damaged(f"{METADATA} is not as it was saved (SHA-256)")
    if str(step) != place.name:
        raise Damaged(f"{METADATA} is of step {step}")
    sound = all(isinstance(meta.get(part), dict) for part in parts)
    if not sound or ("config" in parts and not isinstance(meta["data"].get("fingerprint"), str)):
        raise Damaged(f"{METADATA} is not of this program")
    return meta
