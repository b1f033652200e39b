"""Copy a run's checkpoints to object storage, and fetch them where the disk has none: `checkpoint.store`.

A run saves to its own disk, where one rename completes a checkpoint; process 0 then uploads it in a thread. (Orbax 0.12
itself cannot save to `s3://`, in any of its modes of atomicity: `tests/e2e/storage/test_orbax.py`.) Step n's copy is
the folder n with the checkpoint's files; its metadata are written last, and without them it is no copy. The URL also
holds the small files of the run directory, so that a run can resume from a copy alone. A fetched checkpoint is verified
by the fingerprints of its arrays, like any other.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ultrascale_jax.checkpoint.run_metadata import config_from_dict
from ultrascale_jax.checkpoint.step_dirs import (
    CORRUPT,
    METADATA,
    files,
    is_step,
    quarantine,
)
from ultrascale_jax.config import Config, require
from ultrascale_jax.huggingface.files import ORIGINAL, TOKENIZER, TRAVELLING
from ultrascale_jax.launch.disk import Disk
from ultrascale_jax.launch.events import Events, printable, say
from ultrascale_jax.launch.failures import Damaged, NotNow
from ultrascale_jax.launch.run_files import CHECKPOINTS, METRICS, write_atomic
from ultrascale_jax.storage.cache import cache_folder, exclusive, name_of, require_room
from ultrascale_jax.storage.foreign import parse_json
from ultrascale_jax.storage.remote import WORKERS, Remote, RemoteRefused, is_url
from ultrascale_jax.units import size

CONFIG = "config.json"

SMALL_FILES = (CONFIG, METRICS, ORIGINAL, *TRAVELLING)
"""Files of the run directory that are copied with every checkpoint."""

MOST_BYTES = 1 << 32
"""Largest of these that is fetched; a row of metrics has about 500 bytes."""

FETCHING = "fetching"
"""Folder among the checkpoints for one that is being fetched."""


class Copies:
    """The copies of one run's checkpoints; the methods raise `RemoteError`."""

    def __init__(self, url: str):
        """Open the folder `url`, without asking for anything. Raises `UserError` where a package is missing."""
        self.remote = Remote(url)
        self.url = self.remote.url

    def steps(self) -> list[int]:
        """Return the steps that have a complete copy, oldest first.

        Raises `RemoteRefused` where other files are there: the copies have the place for themselves.
        """
        names = self.remote.files()
        if names and CONFIG not in names:
            raise RemoteRefused(
                f"{self.url}: holds something else than a run's copies, as it has no {CONFIG}; choose another place"
            )
        return _steps_in(name.removesuffix(f"/{METADATA}") for name in names)

    def upload(self, place: Path, uploaded: Callable[[], None] = lambda: None) -> int:
        """Upload the checkpoint at `place`; return its size in bytes.

        `uploaded` is called before each file. Raises `RemoteRefused` where a newer copy is there, of another job: at
        its start a run takes the newest, or marks it as incomplete.
        """
        step, sizes = int(place.name), files(place)
        if self.remote.read(f"{step}/{METADATA}") == (place / METADATA).read_bytes():
            return sum(sizes.values())
        if (newest := max(self.steps(), default=0)) > step:
            raise RemoteRefused(
                f"{self.url}: another job made a copy of step {newest}; stop one, or choose another checkpoint.store"
            )
        self._remove(step)

        def upload(name: str) -> None:
            uploaded()
            self.remote.upload(place / name, f"{step}/{name}")

        _on_threads(upload, (name for name in sizes if name != METADATA))
        upload(METADATA)
        return sum(sizes.values())

    def forget(self, step: int) -> None:
        """Rename the metadata of a copy, which is none then; it is deleted when the step is copied again."""
        name = f"{step}/{METADATA}"
        if (content := self.remote.read(name)) is not None:
            self.remote.write(name + CORRUPT, content)
            self.remote.remove([name])

    def remove_old(self, newest: int, keep: int | None) -> None:
        """Remove the remains of ended uploads, and all but the newest `keep` copies; `newest` was made last."""
        copied = self.steps()
        kept = {*copied[-keep if keep else 0 :], newest}
        for step in _steps_in(name.partition("/")[0] for name in self.remote.files()):
            if step not in kept:
                self._remove(step)

    def _remove(self, step: int) -> None:
        """Remove a copy, complete or not; it stops counting as one at once."""
        self.remote.remove([f"{step}/{METADATA}"])
        _on_threads(lambda name: self.remote.remove([f"{step}/{name}"]), self.sizes(step))

    def sizes(self, step: int) -> dict[str, int]:
        """Return the files of a copy, and their sizes."""
        stored = self.remote.files(str(step))
        return {name.removeprefix(f"{step}/"): size for name, size in stored.items()}

    def fetch_metadata(self, step: int, folder: Path) -> Path:
        """Fetch the metadata of a copy into `FETCHING` in `folder`, the checkpoints of a run; return its place there.

        Raises `Damaged` if it has none.
        """
        name, place = f"{step}/{METADATA}", folder / FETCHING / str(step)
        content = self.remote.read(name)
        if content is None:
            raise Damaged(f"{METADATA} is missing")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        (place / METADATA).write_bytes(content)
        made = self.remote.modified(name)
        os.utime(place / METADATA, (made, made))
        return place

    def fetch(self, step: int, place: Path, names: Iterable[str]) -> None:
        """Fetch these files of a copy into `place`."""

        def download(name: str) -> None:
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self.remote.download(f"{step}/{name}", path)

        _on_threads(download, names)

    def saved_config(self) -> Config:
        """Return the configuration of the run whose copies these are. Raises `UserError` if it is missing."""
        content = self.remote.read(CONFIG)
        fix = f"holds no {CONFIG}; give the checkpoint.store of a training run"
        require(content is not None, "checkpoint.store", self.url, fix)
        return config_from_dict(parse_json(content or b"", f"{self.url}/{CONFIG}:"))

    def fetch_beside(self, run_dir: Path, *, anew: bool = False) -> None:
        """Write the small files of the run into `run_dir`; `anew` overwrites files that exist."""
        run_dir.mkdir(parents=True, exist_ok=True)
        for name in SMALL_FILES:
            if anew or not (run_dir / name).exists():
                content = self.remote.read(name, MOST_BYTES)
                if content is not None:
                    write_atomic(run_dir / name, content)


class Uploads:
    """Uploads copies of a run's checkpoints, in a thread of process 0."""

    def __init__(self, copies: Copies, cfg: Config, events: Events):
        self._failed_in_a_row, self._problem = 0, ""
        self._copies, self._cfg, self._events = copies, cfg, events
        self._thread, self._closed, self._moved = Disk(), False, time.monotonic()
        self._copying: dict[int, Future[None]] = {}
        """By step: under way, or waiting for its turn."""

    def add(self, place: Path, *, rotate: bool) -> None:
        """Begin to upload the checkpoint at `place`; one that still waits for its turn gives way to it.

        Afterwards the newest `checkpoint.keep` copies are left, or all if not `rotate`.
        """
        for step, copying in self._copying.items():
            if copying.cancel():
                say(f"checkpoint of step {step} gets no copy: uploads are slower")
        if not self.pending:
            self._moved = time.monotonic()
        pending = {step: self._copying[step] for step in self.pending}
        copying = self._thread.submit(lambda: self._upload(place, rotate))
        self._copying = {**pending, int(place.name): copying}

    @property
    def pending(self) -> list[int]:
        """Return the steps that are being uploaded or wait for it: the disk must keep them."""
        return [step for step, copying in self._copying.items() if not copying.done()]

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is pending, or for so many seconds; return whether nothing is."""
        futures.wait([self._copying[step] for step in self.pending], timeout=seconds)
        return not self.pending

    def finish(self, seconds: float, stall_s: float) -> bool:
        """Do as `wait`, and raise `NotNow` if the last upload failed, or made no progress for `stall_s` seconds."""
        done = self.wait(seconds)
        if not done and time.monotonic() - self._moved >= stall_s:
            where = self._copies.url
            raise NotNow(f"a copy to {where} makes no progress; the same command makes it")
        self.check(1)
        return done

    def check(self, most: int) -> None:
        """Raise `NotNow` if the last `most` uploads have failed."""
        if self._failed_in_a_row >= most:
            which = "the last copy" if most == 1 else f"copies ({most} in a row)"
            fix = f"Mend {self._copies.url}; the same command makes the copy that is missing"
            raise NotNow(f"{which} failed: {self._problem}. {fix}")

    def close(self) -> None:
        """End the uploads soon; the next start uploads the missing copies."""
        self._closed = True

    def _upload(self, place: Path, rotate: bool) -> None:
        """Upload one checkpoint, and note how it ended."""
        step, begun = int(place.name), time.monotonic()
        try:
            self._progress()
            self._write_beside()
            size = self._copies.upload(place, self._progress)
        except Exception as error:  # Whatever goes wrong must not end the run.
            if self._closed:
                return
            self._failed_in_a_row += 1
            self._problem = printable(error, 500) or type(error).__name__
            words = {"problem": self._problem, "in_a_row": self._failed_in_a_row}
            self._events.record("copy_failed", step=step, **words)
            say(f"copy of step {step} failed ({self._failed_in_a_row} in a row): {self._problem}")
            return
        self._failed_in_a_row = 0
        self._events.record("copied", step=step, bytes=size, copy_s=time.monotonic() - begun)
        try:
            self._copies.remove_old(step, self._cfg.checkpoint.keep if rotate else None)
        except Exception as error:  # as above
            say(f"warning: old copies in {self._copies.url} cannot be removed: {printable(error)}")

    def _progress(self) -> None:
        self._moved = time.monotonic()
        if self._closed:
            raise InterruptedError("the run ends")

    def _write_beside(self) -> None:
        """Write the small files of the run directory, with the tokenizer of the data."""
        run_dir, tokenizer = Path(self._cfg.log.run_dir), Path(self._cfg.data.tokenizer)
        paths = {name: run_dir / name for name in SMALL_FILES if (run_dir / name).is_file()}
        if TOKENIZER not in paths and tokenizer.is_file():
            paths[TOKENIZER] = tokenizer
        for name, path in paths.items():
            self._copies.remote.write(name, path.read_bytes())


def fetch_run(url: str, run_dir: Path, step: int | None = None) -> None:
    """Fill `run_dir` with one checkpoint: the copy of `step`, or the newest, fetched unless it is there.

    Raises `UserError` for a step without copy, `Damaged` where files are missing, or `RemoteError`.
    """
    copies, folder = Copies(url), run_dir / CHECKPOINTS
    copied_steps = copies.steps()
    fix = "holds no copy of a checkpoint; name a run's checkpoint.store"
    require(bool(copied_steps), "url", copies.url, fix)
    require(
        step in (None, *copied_steps), "step", step, f"{copies.url} holds the steps {copied_steps}"
    )
    step = copied_steps[-1] if step is None else step
    copies.fetch_beside(run_dir, anew=True)
    folder.mkdir(exist_ok=True)
    place, target = copies.fetch_metadata(step, folder), folder / str(step)
    old, new = target / METADATA, place / METADATA
    same = target.is_dir() and old.read_bytes() == new.read_bytes()
    if not same:
        sizes = copies.sizes(step)
        for path in folder.iterdir():
            if path.name != FETCHING:
                shutil.rmtree(path)
        announce_fetch(copies, folder, step, sizes)
        copies.fetch(step, place, sizes)
        complete(place)
    shutil.rmtree(folder / FETCHING, ignore_errors=True)


def announce_fetch(copies: Copies, folder: Path, step: int, sizes: dict[str, int]) -> None:
    """Print a line about the copy that is fetched next. Raises `UserError` where `folder` has no room for it."""
    num_bytes = sum(sizes.values())
    require_room(folder, num_bytes, f"fetching a checkpoint of {copies.url}", "make room")
    say(f"fetching the checkpoint of step {step} ({size(num_bytes)}) from {copies.url}")


def complete(place: Path) -> None:
    """Move a fetched checkpoint to its place; an old one of that step is renamed (`quarantine`)."""
    target = place.parents[1] / place.name
    if target.exists():
        quarantine(target)
    place.rename(target)
    with contextlib.suppress(OSError):
        place.parent.rmdir()


def run_on_disk(run: str, step: int | None = None) -> str:
    """Return the run directory `run`; for a URL the one in this host's cache, with the checkpoint of `step`.

    Raises as `fetch_run`.
    """
    if not is_url(run):
        return run
    folder = cache_folder("runs", name_of(run))
    with exclusive(folder):
        fetch_run(run, folder, step)
    return str(folder)


def _steps_in(folders: Iterable[str]) -> list[int]:
    """Return the steps among the names of folders, oldest first."""
    return sorted({int(folder) for folder in folders if is_step(folder)})


def _on_threads(do: Callable[[str], None], names: Iterable[str]) -> None:
    """Call `do` with each name, in threads; the first error cancels the calls that have not begun, and is raised."""
    with ThreadPoolExecutor(WORKERS) as pool:
        waiting = [pool.submit(do, name) for name in names]
        try:
            for future in waiting:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)
