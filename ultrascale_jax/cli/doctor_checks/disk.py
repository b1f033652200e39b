"""Check that checkpoints can be written to the run directory and to object storage, and that hosts see one folder."""

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax.sharding import Mesh

from ultrascale_jax.checkpoint.step_dirs import check_path
from ultrascale_jax.cli.doctor_checks.findings import Finding, judged
from ultrascale_jax.config import Config, UserError
from ultrascale_jax.launch.multihost import gather
from ultrascale_jax.storage.remote import Remote
from ultrascale_jax.train_step.state import abstract_state

PREFLIGHT = ".doctor-preflight-"
"""Start of the name of the run directory of a preflight, in that of the run."""

PROBE_BYTES = 16 * 2**20
SEEN_S = 30.0
"""Seconds until other hosts must see a file; NFS keeps what it knows of a folder for up to 30 s."""


def checkpoint_bytes(cfg: Config, mesh: Mesh) -> int:
    """Return the bytes of one checkpoint of `cfg`."""
    leaves = jax.tree.leaves(abstract_state(cfg, mesh))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@contextlib.contextmanager
def as_before(folder: Path) -> Iterator[Callable[[], None]]:
    """Remove what the doctor left in `folder`, and the folders that the block made, if nothing else is in them.

    The block gets a function that does so at once.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    gather(None)

    def restore() -> None:
        for left in folder.glob(f"{PREFLIGHT}*") if jax.process_index() == 0 else ():
            shutil.rmtree(left, ignore_errors=True)
        for path in made if jax.process_index() == 0 else ():
            with contextlib.suppress(OSError):
                path.rmdir()

    yield restore
    gather(None)
    restore()


def checks(cfg: Config, size: int) -> list[Finding]:
    """Write, sync and rename a file in the run directory, and compare the room with checkpoints of `size` bytes."""
    folder = Path(cfg.log.run_dir)
    found = [*_write(folder), *_shared(folder)]
    if folder.is_dir():
        stat = os.statvfs(folder)
        free, keep = stat.f_frsize * stat.f_bavail, cfg.checkpoint.keep + 1
        text = f"{free / 1e9:.1f} GB free; a checkpoint has {size / 1e9:.3f} GB, and {keep} are there at times"
        fix = "Make room, or choose another --run-dir, or a smaller --checkpoint.keep"
        verdict = "FAIL" if free < size else "WARN"
        found.append(judged(free < keep * size, "disk space", text, fix, verdict))
    return found + (_store(cfg.checkpoint.store) if cfg.checkpoint.store else [])


def _store(url: str) -> list[Finding]:
    """Write, read and remove an object where copies of checkpoints go, and see if a lock can be exclusive there."""
    own = _try_object(url)
    problems = [words for words in gather(own if isinstance(own, str) else None) if words]
    if problems:
        fix = "Mend it, or choose another --checkpoint.store"
        return [Finding("FAIL", "object storage", problems[0], fix)]
    exclusive, speed = (min(values) for values in zip(*gather(own), strict=True))
    text = f"{url} can be written, read and removed; {speed:.0f} MB/s for one file of {PROBE_BYTES / 1e6:.0f} MB"
    if not exclusive:
        text += "; it writes over an object that was to be new (If-None-Match)"
    fix = "See to it that no two jobs start at once with this checkpoint.store"
    return [judged(not exclusive, "object storage", text, fix)]


def _try_object(url: str) -> tuple[bool, float] | str:
    """Return whether an object is created only once, and the MB/s of a write; or the error in words."""
    name = f".doctor-{uuid.uuid4().hex}"
    try:
        remote, content = Remote(url), os.urandom(PROBE_BYTES)
        begun = time.monotonic()
        remote.create(name, content)
        took = time.monotonic() - begun
        try:
            exclusive = not remote.create(name, content)
            same = remote.read(name, PROBE_BYTES) == content and name in remote.files()
        finally:
            remote.remove([name])
    except UserError as error:
        return str(error)
    return (exclusive, PROBE_BYTES / 1e6 / took) if same else f"{url}: an object came back changed"


def _write(folder: Path) -> list[Finding]:
    own = _try(folder)
    fix = "Make it writable, mount it, or choose another --run-dir"
    if isinstance(own, str):
        gather(None)
        return [Finding("FAIL", "run directory", f"{folder}: {own}", fix)]
    slowest = min(filter(None, gather(own)))
    text = f"{folder} can be written; with fsync {slowest:.0f} MB/s"
    return [Finding("OK", "run directory", text)]


def _try(folder: Path) -> float | str:
    """Write, sync and rename a file; return its MB/s, or the error in words."""
    path = folder / f".doctor-{uuid.uuid4().hex}"
    renamed = path.with_suffix(".renamed")
    try:
        check_path("log.run_dir", folder)
        folder.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        with open(path, "xb") as file:
            file.write(os.urandom(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        os.replace(path, renamed)
        took = time.monotonic() - begun
        size = renamed.stat().st_size
    except UserError as error:
        return str(error)
    except OSError as error:
        return error.strerror or type(error).__name__
    finally:
        for made in (path, renamed):
            with contextlib.suppress(OSError):
                made.unlink()
    return PROBE_BYTES / 1e6 / took if size == PROBE_BYTES else "a file came back shorter"


def _shared(folder: Path) -> list[Finding]:
    """Check that all processes see a file of process 0."""
    if jax.process_count() == 1:
        return []
    path = folder / f".doctor-shared-{gather(uuid.uuid4().hex)[0]}"
    with contextlib.suppress(OSError):
        if jax.process_index() == 0:
            path.write_text("seen")
    gather(None)
    until, seen = time.monotonic() + SEEN_S, False
    while not seen and time.monotonic() < until:
        seen = path.exists() and path.read_text() == "seen"
        time.sleep(0.0 if seen else 0.2)
    blind = [str(rank) for rank, saw in enumerate(gather(seen)) if not saw]
    if jax.process_index() == 0:
        path.unlink(missing_ok=True)
    if blind:
        text = f"processes {', '.join(blind[:8])} do not see what process 0 writes in {folder}"
        fix = "It must be one folder for all hosts: NFS, Lustre, or the same volume in all pods"
        return [Finding("FAIL", "shared folder", text, fix)]
    return [Finding("OK", "shared folder", f"all processes see the same {folder}")]
