"""Write a checkpoint while training continues, and survive a disk that is full, gone or does not answer.

Orbax writes in its own threads, and one rename completes a checkpoint; a thread here waits for them. Whatever goes
wrong is a text that the next save, or the end of the run, asks for: nothing is raised into the training loop.
"""

import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from ultrascale_jax.checkpoint.copies import FETCHING
from ultrascale_jax.checkpoint.restoring import first_line
from ultrascale_jax.checkpoint.step_dirs import DELETED, PARTIAL, files, rename_free
from ultrascale_jax.launch.disk import Disk
from ultrascale_jax.launch.events import Events, say
from ultrascale_jax.launch.exit_codes import CRASHED

TOLD_S = 60.0
"""Seconds between two messages about a save that the process waits for."""

STALL_S = 1200.0
"""Seconds that a save may take before training continues without it; as long as Orbax waits for other processes."""

PROBE_S = 30.0
"""Seconds that the disk may take to answer a probe before a save begins."""

LEAVE_S = 30.0
"""Seconds that a process whose disk does not answer may take to end."""

STALLED = "is still being written"


class Writing:
    """One save under way: waits in a thread until it is complete."""

    def __init__(
        self, place: Path, wait: Callable[[], Any], events: Events, done: Callable[[], None]
    ):
        """`done` is called, on process 0, once the checkpoint at `place` is complete."""
        self.place, self._wait, self._events, self._done = place, wait, events, done
        self._begun = time.monotonic()
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return whether it is not over."""
        return self._thread.is_alive()

    def result(self, stall_s: float) -> str | None:
        """Wait until the save is over, or has taken `stall_s` seconds; return its error, or None."""
        end, next_notice = self._begun + stall_s, self._begun + TOLD_S
        while self.alive:
            now = time.monotonic()
            if now >= end:
                return f"{self.place} {STALLED} after {now - self._begun:.0f} s"
            if now >= next_notice:
                next_notice += TOLD_S
                say(f"waiting for {self.place}: {now - self._begun:.0f} s so far")
            self._thread.join(timeout=max(0.0, min(end, next_notice) - now))
        return self._problem

    def _run(self) -> None:
        try:
            self._wait()
            write_s = time.monotonic() - self._begun
            if jax.process_index() == 0:
                size = sum(files(self.place).values())
                step = int(self.place.name)
                self._events.record("saved", step=step, bytes=size, write_s=write_s)
                self._done()
        except Exception as error:  # Orbax raises whatever the file system does.
            if jax.process_index() == 0:
                # Free its room: the next one may need it.
                for partial in self.place.parent.glob(f"{self.place.name}{PARTIAL}*"):
                    shutil.rmtree(partial, ignore_errors=True)
            self._problem = first_line(error) or type(error).__name__


class Probe:
    """Checks, before each save, whether the process can write in a folder."""

    def __init__(self, folder: Path):
        self._folder, self._disk = folder, Disk()
        self._device: int | None = None

    def __call__(self) -> str | None:
        """Return the problem, or None."""
        problem = self._disk.ask(self._try, PROBE_S)
        return f"{self._folder} does not answer" if problem is None else problem or None

    def _try(self) -> str:
        path = self._folder / f".probe-{jax.process_index()}"
        try:
            device = os.stat(self._folder).st_dev
            if self._device not in (None, device):
                return f"{self._folder} is on another disk than it was: is it unmounted?"
            self._device = device
            path.unlink(missing_ok=True)
            with open(path, "x") as file:
                file.write("x")
                file.flush()
                os.fsync(file.fileno())
            os.replace(path, path.with_suffix(".renamed"))
            path.with_suffix(".renamed").unlink()
        except OSError as error:
            return f"cannot write in {self._folder} ({error.strerror})"
        return ""


def move_aside(path: Path) -> None:
    """Rename a folder or file to the first free name of path.1, path.2, ..., unless it is empty or not there."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    aside = rename_free(path, (f"{path.name}.{number}" for number in itertools.count(1)))
    say(f"checkpoint.resume=never: moved the earlier {path.name} to {aside}")


def sweep(folder: Path) -> None:
    """Remove the files that a process killed during a save, a deletion, a fetch or a `Probe` left in `folder`."""
    for left in folder.glob(".probe-*"):
        left.unlink(missing_ok=True)
    for partial in folder.glob(f"*{PARTIAL}*"):
        shutil.rmtree(partial)
    for deleted in folder.glob(f"*{DELETED}"):
        shutil.rmtree(deleted, ignore_errors=True)
    shutil.rmtree(folder / FETCHING, ignore_errors=True)


def leave_in_time() -> None:
    """End this process in `LEAVE_S` seconds: Python would wait for ever for threads whose disk does not answer."""

    def leave():
        say(f"the disk does not answer; leaving after {LEAVE_S:g} s")
        os._exit(CRASHED)

    timer = threading.Timer(LEAVE_S, leave)
    timer.daemon = True
    timer.start()
