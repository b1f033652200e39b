"""Find the files that a pattern names: each file once, hidden ones left out, and a path that exists is no pattern."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from ultrascale_jax.config import UserError, require


def matching_files(pattern: str, option: str, prefix: str = "") -> list[Path]:
    """Return the files that a path, or a pattern with `*`, `**`, `?` and `[ab]`, names, in order.

    The longest beginning that exists is taken as it is, also with `[1]` in it. A file that several names reach, by
    symbolic links, has the first of them. Raises `UserError` that names the `option`, whose value begins with `prefix`,
    for a folder, for one that cannot be read, and for a link that leads nowhere.
    """
    path = Path(pattern)
    existing = next(one for one in (path, *path.parents) if os.path.lexists(one))
    is_path = bool(pattern) and existing == path and path.exists()
    fix = f"is a folder; write {prefix}{path / '*'}, or {prefix}{path / '**'} for all below it"
    require(not (is_path and path.is_dir()), option, f"{prefix}{pattern}", fix)
    fix = "is no regular file; write what it gives to a file first"
    require(not is_path or path.is_file(), option, f"{prefix}{pattern}", fix)
    escaped = Path(glob.escape(str(existing)), path.relative_to(existing))
    files: dict[Path, Path] = {}
    for match in sorted(_expanded(escaped, option)):
        fix = "is a link to a file that is not there; fetch the file, or remove the link"
        require(match.exists() or not match.is_symlink(), option, str(match), fix)
        if match.is_file():
            files.setdefault(match.resolve(), match)
    return list(files.values())


def _expanded(pattern: Path, option: str) -> Iterator[Path]:
    """Yield the names that match; below `**` each folder is entered once, whatever links lead to it."""
    if "**" not in pattern.parts:
        yield from map(Path, glob.glob(str(pattern)))
        return

    def refuse(error: OSError) -> None:
        raise UserError(f"{option}={error.filename!r}: cannot be read ({error.strerror})")

    place = pattern.parts.index("**")
    prefix, suffix = Path(*pattern.parts[:place]), pattern.parts[place + 1 :] or ("*",)
    entered: set[str] = set()
    for top in sorted(glob.glob(str(prefix))):
        for folder, below, _ in os.walk(top, onerror=refuse, followlinks=True):
            below[:] = sorted(name for name in below if not name.startswith("."))
            if (real := os.path.realpath(folder)) in entered:
                below.clear()
                continue
            entered.add(real)
            yield from _expanded(Path(glob.escape(folder), *suffix), option)
