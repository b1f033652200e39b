"""Report one process's progress, and end the process when there is none.

The loop reports its section (`FIRST_S`) and each completed step. From that come the heartbeat file `heartbeats/RANK`,
in which a supervisor sees a process that is stuck; the events of `goodput`; and the end of the process when a section
exceeds its limit: `FACTOR` times the longest that the section, or the step, took so far, at least `FLOOR_S`, and before
the first one `FIRST_S`. `faulthandler.dump_traceback_later` ends it: a thread in C, which needs neither Python's lock
nor a disk, because the stacks go through a pipe that never blocks to a process that writes them. The supervisor kills a
process that is stopped. Another thread writes the heartbeat, so a disk that does not answer delays nothing.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale_jax.launch.events import (
    UNREADABLE,
    Events,
    boot,
    is_count,
    is_number,
    is_supervised,
)
from ultrascale_jax.launch.procfs import read_stat

HEARTBEATS = "heartbeats"
STACKS = "stacks"
DUMP_SIGNAL = signal.SIGUSR2
"""A process that gets it writes the stacks of all its threads to its file in `STACKS`, and continues."""

FACTOR = 10.0
FLOOR_S = 60.0
DATA_FLOOR_S = 300.0
"""In a wait for data: storage that answers late is no fault of the process."""

SAVE_FLOOR_S = 1800.0
"""A save may be short a hundred times and then wait for a slow disk; `saving.py` gives up long before this."""

SHORT = ("start", "warm-up", "step", "evaluate", "compare", "hook", "end")
LONG = ("restore", "compile", "save", "profile")
FIRST_S = dict.fromkeys(SHORT, 1800.0) | dict.fromkeys(LONG, 3600.0)
"""Limit of each section before its first run, in seconds; `end` is the section after the watch."""

ONCE = ("start", "restore", "compile", "warm-up", "end")
"""Sections up to the first step, for which the processes of a loaded host wait longer than for any other, and after the
last; `watch.hang_s` is for the others."""

WRITER = 'read -r first && { printf "%s\\n" "$0" >&2 & printf "%s\\n" "$first"; cat; }'
"""Program of `sh` that copies its input, if there is any, and tells its argument on stderr: either may block."""

SIZE = 512
"""Bytes of a heartbeat file: it is written in place, which a full disk allows."""


@dataclass(frozen=True)
class Beat:
    """One reading of a heartbeat file."""

    pid: int
    step: int
    furthest: int
    """The most steps that this run, or an earlier try of it, has done."""
    section: str
    bound_s: float
    """Seconds after `monotonic` from which the process counts as stuck."""
    time: float
    """Time of the last progress, in unix seconds."""
    monotonic: float
    """Time of the last progress on the host's monotonic clock, which all its processes share."""
    data_wait_s: float
    """Seconds that this process has waited for batches while its devices were idle."""
    boot: str
    """The boot from which `monotonic` counts; empty if unknown."""


def limit(section: str) -> None:
    """End a process under a supervisor, with its stacks on stderr, if `section`, outside a `Watch`, takes too long."""
    if is_supervised(os.environ):
        faulthandler.dump_traceback_later(FIRST_S[section], exit=True)


def read_beat(run_dir: Path, rank: int) -> Beat | None:
    """Return the heartbeat of `rank`; None if it cannot be read."""
    try:
        values = {"boot": ""} | json.loads((run_dir / HEARTBEATS / str(rank)).read_bytes())
        fields = {name: values[name] for name in Beat.__annotations__}
    except (OSError, TypeError, KeyError, *UNREADABLE):
        return None
    fits = {int: is_count, float: is_number, str: lambda value: isinstance(value, str)}
    return (
        Beat(**fields) if all(fits[Beat.__annotations__[n]](v) for n, v in fields.items()) else None
    )


def last_sign(run_dir: Path, rank: int = 0) -> dict[str, Any]:
    """Return the last heartbeat of a process, living or dead, as an event records it; empty if there is none."""
    beat = read_beat(run_dir, rank)
    return {} if beat is None else vars(beat)


def stacks_path(run_dir: Path, rank: int, attempt: int) -> Path:
    """Return the file for the stack traces of `rank`."""
    return run_dir / STACKS / f"rank{rank}.attempt{attempt}.txt"


class Watch:
    """The watch over this process; use it as a context manager around all that trains."""

    def __init__(self, events: Events, *, hang_s: float = 0.0, fresh: bool = False):
        """Begin in section `start`.

        Args:
            events: of this process; its run directory is where everything goes.
            hang_s: bound of all sections that are not in `ONCE`; 0: learned.
            fresh: the run starts anew: no step of an earlier try is done again.
        """
        self._events, self._hang_s, self._fresh = events, hang_s, fresh
        self._run_dir, self._rank = events.path.parent, events.rank or 0
        self.reason = "done"
        """Text for the end of a run that no exception ends."""
        self._longest: dict[str, float] = {}
        self._before = last_sign(self._run_dir, self._rank)
        self._section, self._step = "start", 0
        self._furthest = 0 if fresh else int(self._before.get("furthest", 0))
        self._data_wait_s, self._in_data = 0.0, False
        self._mark = time.monotonic()
        self._host = socket.gethostname()
        self._stacks: int | None = None
        """Descriptor that the stacks are written to, while the watch lasts."""
        self._changed, self._done = threading.Event(), threading.Event()
        self._writing = threading.Thread(target=self._keep, name="heartbeat", daemon=True)

    def __enter__(self) -> "Watch":
        path = self._run_dir / HEARTBEATS / str(self._rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.stacks = stacks_path(self._run_dir, self._rank, self._events.attempt)
        self.stacks.parent.mkdir(exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        self._open_stacks()
        # From now on its stacks may be requested by a signal.
        self._write()
        self._arm()
        self._writing.start()
        if self._rank == 0:
            details = {"age_s": _process_age_s(), "fresh": self._fresh, "before": self._before}
            self._events.record("start", **details)
        return self

    def __exit__(self, kind: type | None, error: object, trace: object) -> None:
        self._section, self._mark = "end", time.monotonic()
        self._done.set()
        self._changed.set()
        self._writing.join(timeout=10.0)
        self._close_stacks()
        if not self._writing.is_alive():
            os.close(self._file)
        if self._rank == 0:
            reason = self.reason if kind is None else kind.__name__
            waited = self._data_wait_s
            self._events.record("end", step=self._step, reason=reason, data_wait_s=waited)

    def _open_stacks(self) -> None:
        """Start the process that writes the stacks, and have the signal for them answered."""
        words = f"rank {self._rank}: the stacks of its threads, which tell what it waited for, are in {self.stacks}"
        with open(self.stacks, "ab", 0) as file:
            self._writer = subprocess.Popen(
                ["sh", "-c", WRITER, words], stdin=subprocess.PIPE, stdout=file, process_group=0
            )
        assert self._writer.stdin is not None
        self._stacks = self._writer.stdin.fileno()
        os.set_blocking(self._stacks, False)
        faulthandler.register(DUMP_SIGNAL, self._stacks, all_threads=True)

    def _close_stacks(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        limit("end")
        faulthandler.unregister(DUMP_SIGNAL)
        self._stacks = None
        assert self._writer.stdin is not None
        self._writer.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._writer.wait(timeout=10.0)
        if self.stacks.stat().st_size == 0:
            self.stacks.unlink()

    def _arm(self) -> None:
        """Have this process end when its section exceeds its limit, whatever it does then."""
        if self._stacks is not None:
            left_s = self._mark + self._bound_s(self._section) - time.monotonic()
            faulthandler.dump_traceback_later(max(left_s, 1e-3), exit=True, file=self._stacks)

    def begin(self, step: int) -> None:
        """Begin the steps after `step`; the first, in which NCCL connects and memory is allocated, is `warm-up`."""
        self._step = step
        self._enter("warm-up")

    def beat(self, step: int) -> None:
        """Record that step `step` is done."""
        self._learn("step")
        if self._section == "warm-up":
            self._enter("step")
        again = self._step < self._furthest
        self._step, self._mark = step, time.monotonic()
        if again and step >= self._furthest:
            self._enter("step")
        self._furthest = max(self._furthest, step)
        self._changed.set()
        self._arm()

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count the time of the block to section `name`, then that of the section before it again."""
        outer = self._section
        self._enter(name)
        try:
            yield
        finally:
            self._learn(name)
            self._enter(outer)

    @contextlib.contextmanager
    def data(self, hidden: Callable[[], bool]) -> Iterator[None]:
        """Count the wait for a batch, with the limit of its section, or `DATA_FLOOR_S` if that is more.

        It is counted as lost, unless at its end `hidden`: the devices are still busy with earlier steps.
        """
        begun, self._in_data = time.monotonic(), True
        self._arm()
        try:
            yield
        finally:
            self._in_data = False
            self._changed.set()
            self._arm()
            if not hidden():
                self._data_wait_s += time.monotonic() - begun

    def _enter(self, name: str) -> None:
        self._section, self._mark = name, time.monotonic()
        self._changed.set()
        self._arm()
        if self._rank == 0:
            again = name == "step" and self._step < self._furthest
            name, waited = "again" if again else name, self._data_wait_s
            self._events.record("section", name=name, step=self._step, data_wait_s=waited)

    def _learn(self, name: str) -> None:
        took = time.monotonic() - self._mark
        self._longest[name] = max(took, self._longest.get(name, 0.0))

    def _bound_s(self, section: str) -> float:
        if self._hang_s > 0 and section not in ONCE:
            return self._hang_s
        longest = self._longest.get(section)
        floor_s = SAVE_FLOOR_S if section == "save" else FLOOR_S
        floor_s = max(floor_s, DATA_FLOOR_S) if self._in_data else floor_s
        return FIRST_S[section] if longest is None else max(floor_s, FACTOR * longest)

    def _beat(self) -> Beat:
        mark, section = self._mark, self._section
        return Beat(
            pid=os.getpid(),
            step=self._step,
            furthest=self._furthest,
            section="data" if self._in_data else section,
            bound_s=self._bound_s(section),
            time=time.time() - (time.monotonic() - mark),
            monotonic=mark,
            data_wait_s=self._data_wait_s,
            boot=boot(),
        )

    def _write(self) -> None:
        beat = {"rank": self._rank, "host": self._host, **vars(self._beat())}
        with contextlib.suppress(OSError):
            os.pwrite(self._file, json.dumps(beat).ljust(SIZE - 1).encode() + b"\n", 0)

    def _keep(self) -> None:
        """Run in a thread: keep the heartbeat file up to date."""
        written, over = None, False
        while not over:
            self._changed.wait(timeout=0.25)
            self._changed.clear()
            over = self._done.is_set()
            if (now := (self._mark, self._in_data)) != written:
                written = now
                self._write()


def _process_age_s() -> float:
    """Return the seconds since this process was started, before Python was; 0 if the system does not say."""
    stat = read_stat("self")
    if stat is None:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - stat.start_ticks / os.sysconf("SC_CLK_TCK")
