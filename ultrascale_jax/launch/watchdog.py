"""Report one process's progress, account for its time, and end it when there is no progress.

The loop reports its section (`FIRST_S`) and each completed step. From that come the heartbeat file, which holds the
ledger (`goodput.py`), and the end of the process when a section exceeds its limit: `FACTOR` times the longest that the
section, or the step, took so far, at least `FLOOR_S`, and before the first one `FIRST_S`.
`faulthandler.dump_traceback_later` ends it: a thread in C, which needs neither Python's lock nor a disk, because the
stacks go through a pipe that never blocks to a process that writes them. Another thread writes the heartbeat, so a disk
that does not answer delays nothing.
"""

import contextlib
import faulthandler
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ultrascale_jax.launch.events import Events, is_supervised
from ultrascale_jax.launch.goodput import HEARTBEATS, OF_SECTION, Ledger, begun_again, stacks_path

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

SIZE = 1024
"""Bytes of a heartbeat file: it is written in place, which a full disk allows."""

ALIVE_S = 5.0
"""Seconds after which a heartbeat is written though there was no progress."""


def limit(section: str) -> None:
    """End a process under a supervisor, with its stacks on stderr, if `section`, outside a `Watch`, takes too long."""
    if is_supervised(os.environ):
        faulthandler.dump_traceback_later(FIRST_S[section], exit=True)


class Watch:
    """The watch over this process; use it as a context manager around all that trains."""

    def __init__(self, events: Events, *, hang_s: float = 0.0, fresh: bool = False):
        """Begin in section `start`.

        Args:
            events: of this process; its run directory is where everything goes.
            hang_s: bound of all sections that are not in `ONCE`; 0: learned.
            fresh: the run starts anew: no step of an earlier try is done again.
        """
        self._events, self._hang_s = events, hang_s
        self._run_dir, self._rank = events.path.parent, events.rank or 0
        self.reason = "done"
        """Text for the end of a run that no exception ends."""
        self._longest: dict[str, float] = {}
        self._ledger, self._fresh = Ledger(), fresh
        self._section, self._step = "start", 0
        self._waited_s, self._in_data = 0.0, False
        """`_waited_s`: seconds since the last progress in which devices waited for a batch."""
        self._mark = time.monotonic()
        self._stacks: int | None = None
        """Descriptor that the stacks are written to, while the watch lasts."""
        self._host = socket.gethostname()
        self._changed, self._done = threading.Event(), threading.Event()
        self._writing = threading.Thread(target=self._keep, name="heartbeat", daemon=True)

    def __enter__(self) -> "Watch":
        path = self._run_dir / HEARTBEATS / str(self._rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.stacks = stacks_path(self._run_dir, self._rank, self._events.attempt)
        self.stacks.parent.mkdir(exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        self._open_stacks()
        self._ledger = begun_again(
            None if self._fresh else self._run_dir, self._rank, _process_age_s()
        )
        self._mark = time.monotonic()
        self._write()
        self._arm()
        self._writing.start()
        if self._rank == 0:
            self._events.record("start", restarts=self._ledger.restarts)
        return self

    def __exit__(self, kind: type | None, error: object, trace: object) -> None:
        self.reason = self.reason if kind is None else kind.__name__
        self._enter("end")
        self._done.set()
        self._changed.set()
        self._writing.join(timeout=10.0)
        self._close_stacks()
        if not self._writing.is_alive():
            os.close(self._file)
        if self._rank == 0:
            self._events.record("end", step=self._step, reason=self.reason)

    def _open_stacks(self) -> None:
        """Start the process that writes the stacks."""
        words = f"rank {self._rank}: the stacks of its threads, which tell what it waited for, are in {self.stacks}"
        with open(self.stacks, "ab", 0) as file:
            self._writer = subprocess.Popen(
                ["sh", "-c", WRITER, words], stdin=subprocess.PIPE, stdout=file, process_group=0
            )
        assert self._writer.stdin is not None
        self._stacks = self._writer.stdin.fileno()
        os.set_blocking(self._stacks, False)

    def _close_stacks(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        limit("end")
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
        if self._rank == 0:
            self._events.record("begin", step=step)

    def beat(self, step: int) -> None:
        """Record that step `step` is done."""
        self._learn("step")
        if self._step < self._ledger.steps:
            self._ledger.steps_again += step - self._step
        self._enter("step")
        self._step, self._ledger.steps = step, max(self._ledger.steps, step)
        self._changed.set()

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
                self._waited_s += time.monotonic() - begun

    def _enter(self, name: str) -> None:
        """Count the time since the last progress, and begin section `name`."""
        now, kind = time.monotonic(), OF_SECTION[self._section]
        if kind == "productive" and self._step < self._ledger.steps:
            kind = "again"
        passed_s, waited_s = now - self._mark, self._waited_s
        self._ledger.seconds["data"] += waited_s
        self._ledger.seconds[kind] += passed_s - waited_s
        self._section, self._mark, self._waited_s = name, now, 0.0
        self._changed.set()
        self._arm()

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

    def _write(self) -> None:
        """Write the fields of `goodput.Beat`."""
        mark, now = self._mark, time.time()
        beat = {
            "rank": self._rank,
            "host": self._host,
            "pid": os.getpid(),
            "step": self._step,
            "section": "data" if self._in_data else self._section,
            "progress": now - (time.monotonic() - mark),
            "time": now,
            "done": self._section == "end" and self.reason == "done",
            "ledger": vars(self._ledger),
        }
        with contextlib.suppress(OSError):
            os.pwrite(self._file, json.dumps(beat).ljust(SIZE - 1).encode() + b"\n", 0)

    def _keep(self) -> None:
        """Run in a thread: keep the heartbeat file up to date."""
        written, over = 0.0, False
        while not over:
            changed = self._changed.wait(timeout=0.25)
            self._changed.clear()
            over = self._done.is_set()
            if changed or time.monotonic() - written > ALIVE_S:
                written = time.monotonic()
                self._write()


def _process_age_s() -> float:
    """Return the seconds since this process was started, before Python was; 0 where there is no /proc."""
    if not sys.platform.startswith("linux"):
        return 0.0
    # The fields after the name, which is in brackets and may hold anything; the 22nd is the start in ticks.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
