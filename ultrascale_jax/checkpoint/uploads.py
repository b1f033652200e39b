"""Copy a run's checkpoints to object storage in the background: `checkpoint.store`.

A run saves to its own folder, where one rename completes a checkpoint; process 0 uploads the complete ones in a thread,
the manifest last. What fails is tried again, and told; nothing is raised into the training loop from here.
"""

import threading
import time
from pathlib import Path

from ultrascale_jax.checkpoint import manifest
from ultrascale_jax.checkpoint.copies import (
    BESIDE,
    UPLOADING,
    Copies,
    is_step,
    on_threads,
    steps_in,
)
from ultrascale_jax.config import Config
from ultrascale_jax.huggingface.files import TOKENIZER
from ultrascale_jax.launch.events import Events, printable, say
from ultrascale_jax.launch.run_files import read_regular
from ultrascale_jax.storage.remote import RemoteError, RemoteRefused

PAUSES_S = (1.0, 10.0, 60.0)
"""Pauses after which a failed upload goes on; the libraries try each request several times themselves."""


class Stopped(Exception):
    """The run ends before the upload does."""


class Uploads:
    """The copies that one run makes of its checkpoints, on process 0."""

    def __init__(self, copies: Copies, cfg: Config, events: Events | None = None):
        self.failed_in_a_row = 0
        self.problem: str | None = None
        """Why the last upload failed; None if it did not."""
        self.moved = time.monotonic()
        """The last time that an upload made progress."""
        self._copies, self._cfg, self._events = copies, cfg, events
        self._lock, self._closed = threading.Lock(), False
        self._now: tuple[Path, bool] | None = None
        self._next: tuple[Path, bool] | None = None
        self._thread: threading.Thread | None = None

    def add(self, place: Path, *, rotate: bool) -> None:
        """Begin to upload the checkpoint at `place`; one that still waits for its turn gives way to it.

        Afterwards the newest `checkpoint.keep` copies are left, or all if not `rotate`.
        """
        with self._lock:
            if self._next is not None:
                say(f"checkpoint of step {self._next[0].name} gets no copy: uploads are slower")
            self._next = (place, rotate)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
                self._thread.start()

    @property
    def pending(self) -> list[int]:
        """Return the steps that are being uploaded or wait for it: the disk must keep them."""
        with self._lock:
            return [int(work[0].name) for work in (self._now, self._next) if work is not None]

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is pending, or for so many seconds; return whether nothing is."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout=seconds)
        return not self.pending

    def is_stuck(self, stall_s: float) -> bool:
        """Return whether an upload is pending and made no progress for so many seconds."""
        return bool(self.pending) and time.monotonic() - self.moved >= stall_s

    def close(self) -> None:
        """End the uploads soon: what is there already stays, and the next start goes on."""
        self._closed = True

    def _run(self) -> None:
        while True:
            with self._lock:
                self._now, self._next = self._next, None
                if self._now is None:
                    self._thread = None
                    return
            self._work(*self._now)

    def _work(self, place: Path, rotate: bool) -> None:
        """Upload one checkpoint, and note how it ended."""
        step, begun = int(place.name), time.monotonic()
        self.moved = begun
        for pause_s in (*PAUSES_S, None):
            problem: str | None = None
            try:
                size = self._upload(place)
            except Stopped:
                return
            except Exception as error:  # Whatever goes wrong must not end the run.
                problem = printable(error, 500) or type(error).__name__
                if pause_s is None or isinstance(error, RemoteRefused):
                    break
                time.sleep(pause_s)
            else:
                took = time.monotonic() - begun
                self._record("copied", step=step, bytes=size, copy_s=took)
                self.failed_in_a_row, self.problem = 0, None
                self._rotate(step, rotate)
                return
        self.failed_in_a_row += 1
        self.problem = problem
        in_a_row = self.failed_in_a_row
        self._record("copy_failed", step=step, problem=problem, in_a_row=in_a_row)
        say(f"copy of step {step} failed ({in_a_row} in a row): {problem}")

    def _record(self, kind: str, **details: object) -> None:
        if self._events is not None:
            self._events.record(kind, **details)

    def _upload(self, place: Path) -> int:
        """Upload the checkpoint at `place`, the manifest last; return its size in bytes."""
        step = place.name
        if not (place / manifest.NAME).exists():
            # Its writer was ended; its arrays were verified when it was loaded.
            manifest.write(place)
        sizes, content = manifest.files(place), read_regular(place / manifest.NAME)
        there = self._copies.files(step)
        if manifest.NAME in there:
            if self._copies.remote.read(f"{step}/{manifest.NAME}", manifest.MOST_BYTES) == content:
                return sum(sizes.values())
        elif there and UPLOADING not in there:
            where = f"{self._copies.url}/{step}"
            raise RemoteRefused(f"{where}: holds something else; choose another checkpoint.store")
        begun = self._copies.remote.read(f"{step}/{UPLOADING}", manifest.MOST_BYTES) == content
        if manifest.NAME in there or not begun:
            if there:
                self._copies.remove(int(step))
                there = {}
            self._copies.remote.write(f"{step}/{UPLOADING}", content)

        def upload(name: str) -> None:
            if self._closed:
                raise Stopped
            self._copies.remote.upload(place / name, f"{step}/{name}")
            self.moved = time.monotonic()

        on_threads(upload, (name for name, size in sizes.items() if there.get(name) != size))
        for name, beside in files_beside(self._cfg).items():
            self._copies.remote.write(name, beside)
        found = self._copies.files(step)
        found.pop(UPLOADING, None)
        if found != sizes:
            raise RemoteError(f"{self._copies.url}/{step}: holds other files than were written")
        self._copies.remote.write(f"{step}/{manifest.NAME}", content)
        self._copies.remote.remove([f"{step}/{UPLOADING}"])
        return sum(sizes.values())

    def _rotate(self, step: int, rotate: bool) -> None:
        """Remove copies older than the newest `checkpoint.keep`, and what ended uploads have left.

        What cannot be removed is told, and the next copy tries again.
        """
        try:
            self._remove_old(step, rotate)
        except Exception as error:  # As in `_work`.
            say(f"warning: old copies in {self._copies.url} cannot be removed: {printable(error)}")

    def _remove_old(self, step: int, rotate: bool) -> None:
        files = self._copies.remote.files()
        folders = {name.split("/")[0] for name in files if "/" in name}
        whole = steps_in(files)
        old = set(whole[: -self._cfg.checkpoint.keep]) if rotate else set()
        left = {int(name) for name in folders if is_step(name) and f"{name}/{UPLOADING}" in files}
        for one in old | left - {step, *whole}:
            self._copies.remove(one)


def files_beside(cfg: Config) -> dict[str, bytes]:
    """Return the small files of the run directory that a copy needs, by name, with the tokenizer of the data."""
    run_dir, tokenizer = Path(cfg.log.run_dir), Path(cfg.data.tokenizer)
    found = {name: read_regular(run_dir / name) for name in BESIDE if (run_dir / name).is_file()}
    if TOKENIZER not in found and tokenizer.is_file():
        found[TOKENIZER] = tokenizer.read_bytes()
    return found
