"""Keep the processes of one host alive: start them, end them together and start them again.

When one process of a job dies, the others wait in a collective, so all are ended. One that makes no progress ends
itself (`watchdog.py`); one that a signal has stopped is killed with the processes that ended waiting for it.

There is no restart after an exit code that says it would not help, after a signal to stop, or when `TRIES` restarts in
a row brought no new step and `GIVE_UP_S` seconds have passed since the first failure of that row. SIGTERM stops the run
from the first moment on; a process that dies of it before its first heartbeat had nothing to save.

Every host has its own supervisor, and none talks to the others: the death of one host's processes ends the others' too,
by their heartbeats, and each supervisor restarts its own. So the number of the attempt may differ between hosts.
"""

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ultrascale_jax.launch.disk import Disk
from ultrascale_jax.launch.events import ATTEMPT, Events, is_count, read_events, say
from ultrascale_jax.launch.exit_codes import HUNG, REFUSED, STOPPED
from ultrascale_jax.launch.goodput import Beat, read_beat, read_ledger, stacks_path
from ultrascale_jax.launch.processes import Child, kill
from ultrascale_jax.launch.sigterm import listener

TRIES = 3
"""Restarts without a new step after which the run may be given up."""

GIVE_UP_S = 1800.0
"""Seconds without a new step, from the first failure on, after which it may: storage that fails over, a switch that is
started again and a network that is repaired take less."""

STOP_REQUESTED = "told to stop"

BACK_OFF_S = 1.0
LONGEST_BACK_OFF_S = 60.0

GRACE_S = 8.0
"""Seconds that the others have to end when one has died: they tell each other why, and then the user."""

SHORT_GRACE_S = 2.0
"""Seconds of grace after a kill: no other process knows the cause."""

READ_S = 60.0
"""Seconds to read all events of a long run."""

PYTHON = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}


class Supervisor:
    """The processes `ranks` of a run, on this host."""

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        environments: Callable[[], Sequence[Mapping[str, str]]],
        ranks: Sequence[int],
        run_dir: Path,
        *,
        max_restarts: int | None = None,
        give_up_s: float = GIVE_UP_S,
        fresh: bool = False,
    ):
        """
        Args:
            command: returns the command line of a process, from the number of restarts.
            environments: called before every start: the variables of each process.
            ranks: their numbers in the job.
            run_dir: where heartbeats, stacks and events are.
            max_restarts: give up after so many; none: as long as there is progress.
            give_up_s: give up when `TRIES` restarts or more, and so many seconds, have brought no new step.
            fresh: the run starts anew, whatever the run directory holds.
        """
        self._command, self._environments, self._ranks = command, environments, tuple(ranks)
        self._run_dir, self._max_restarts = run_dir, max_restarts
        self._give_up_s = give_up_s
        self._events, self._disk = Events(run_dir, rank=None), Disk()
        attempts = [event.get("attempt") for event in read_events(run_dir)]
        self._events.attempt = 1 + max(filter(is_count, attempts), default=-1)
        beat = None if fresh else read_beat(run_dir, self._ranks[0])
        self._furthest = beat.ledger.steps if beat else 0
        """The most steps that the run has done."""
        self._restarts, self._no_progress, self._failing_since = 0, 0, time.monotonic()
        self._children: list[Child] = []
        self._signals: list[int] = []

    def run(self) -> int:
        """Run until the run is done, stopped or given up; return the exit code that ended it, 0 if all are well."""
        earlier = listener()
        handlers = {
            number: signal.signal(number, lambda number, _: self._signals.append(number))
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            if self._signals or (earlier is not None and earlier.received):
                self._record("gave_up", ranks=self._ranks, reason=STOP_REQUESTED)
                say("supervisor: told to stop before anything was started")
                return 0
            return self._run()
        finally:
            kill(self._children)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        while True:
            self._start()
            code, cause = self._wait()
            codes = {str(child.rank): child.code for child in self._children}
            self._record("exit", ranks=self._ranks, codes=codes)
            if cause is not None:
                beats = filter(None, map(self._beat, self._children))
                self._count_progress(max((beat.ledger.steps for beat in beats), default=0))
            ledger = self._disk.ask(lambda: read_ledger(self._run_dir), READ_S)
            if ledger is not None:
                say(f"supervisor: {ledger.line()}")
            if cause is None:
                return 0
            why_not = self._why_no_restart(code)
            if why_not is None:
                self._restarts += 1
                pause = min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2**self._no_progress)
                say(f"supervisor: {cause}; restart {self._restarts} in {pause:.0f} s")
                until = time.monotonic() + pause
                while time.monotonic() < until and not self._signals:
                    time.sleep(0.1)
                why_not = STOP_REQUESTED if self._signals else None
            if why_not is not None:
                self._record("gave_up", ranks=self._ranks, reason=why_not, cause=cause, code=code)
                say(f"supervisor: no restart: {why_not}")
                say(cause)
                return code
            self._events.attempt += 1

    def _start(self) -> None:
        self._record("spawn", ranks=self._ranks)
        variables = {ATTEMPT: str(self._events.attempt)} | PYTHON
        command = self._command(self._restarts)
        self._children = []
        for rank, environ in zip(self._ranks, self._environments(), strict=True):
            plain = rank == 0 or len(self._ranks) == 1
            # Each is listed before the next is started, so that an error meanwhile leaves no process behind.
            self._children.append(Child(rank, command, {**environ, **variables}, plain=plain))

    def _wait(self) -> tuple[int, str | None]:
        """Wait until all processes are gone; return the exit code of the first that failed, and the cause, if any."""
        first: Child | None = None
        deadline, forwarded = math.inf, False
        while living := [child for child in self._children if child.code is None]:
            if self._signals and not forwarded:
                # Once, so that all save and stop; a second Ctrl-C kills them.
                forwarded = True
                self._record("told", signal=signal.Signals(self._signals[0]).name)
                for child in living:
                    child.signal(signal.SIGTERM)
            if first is None and (first := self._failed()) is not None:
                deadline = time.monotonic() + (SHORT_GRACE_S if first.was_killed else GRACE_S)
            if time.monotonic() > deadline or self._signals.count(signal.SIGINT) > 1:
                kill(living)
            time.sleep(0.1)
        first = first or self._failed()
        for child in self._children:
            child.drain_output()
        if first is None:
            return 0, None
        if self._signals and first.code == -signal.SIGTERM and self._beat(first) is None:
            # It could not listen yet.
            return 0, "stopped by SIGTERM before the first step"
        return first.exit_code, self._cause(first)

    def _failed(self) -> Child | None:
        """Return the process that failed, if any: the first that a signal killed, because the others died of that."""
        dead = [child for child in self._children if child.code]
        first = min(dead, key=lambda child: (child.code or 0, child.rank), default=None)
        if first is not None:
            self._record("died", of=first.rank, code=first.code)
        return first

    def _beat(self, child: Child) -> Beat | None:
        """Return the newest heartbeat of a process; None before its first, and if the disk does not answer."""
        beat = self._disk.ask(lambda: read_beat(self._run_dir, child.rank))
        return beat if beat is not None and beat.pid == child.process.pid else None

    def _cause(self, first: Child) -> str:
        """Return the cause of the processes' end in one line, as far as it is known."""
        rank, beat = f"rank {first.rank}", self._beat(first)
        if first.was_killed:
            return f"{rank} was killed by {signal.Signals(-(first.code or 0)).name}"
        stacks = stacks_path(self._run_dir, first.rank, self._events.attempt)
        if first.code == HUNG and beat and self._disk.ask(lambda: stacks.stat().st_size):
            self._record(
                "hang", of=first.rank, section=beat.section, step=beat.step, stacks=str(stacks)
            )
            where = f"in section {beat.section} after step {beat.step} (stacks: {stacks})"
            return f"{rank} made no progress {where}"
        events = self._disk.ask(lambda: read_events(self._run_dir), READ_S) or []
        failures = [
            event
            for event in events
            if (event["kind"], event.get("attempt")) == ("failure", self._events.attempt)
        ]
        for event in sorted(failures, key=lambda event: event.get("first") is not True):
            return f"rank {event.get('rank')}: {event.get('summary')}"
        why = "; its error stands above" if first.exit_code in (REFUSED, STOPPED) else ""
        return f"{rank} ended with exit code {first.exit_code}{why}"

    def _count_progress(self, reached: int) -> None:
        """Count the restarts in a row in which the run came no further than before."""
        if reached > self._furthest or not self._restarts:
            self._no_progress, self._failing_since = 0, time.monotonic()
        else:
            self._no_progress += 1
        self._furthest = max(self._furthest, reached)

    def _why_no_restart(self, code: int) -> str | None:
        """Return why an attempt that ended with `code` is the last; None: it is not."""
        failing_s = time.monotonic() - self._failing_since
        if self._signals:
            return STOP_REQUESTED
        if code in (REFUSED, STOPPED):
            return f"exit code {code} says that it would not help"
        if self._no_progress >= TRIES and failing_s >= self._give_up_s:
            return f"no step beyond {self._furthest} in {self._no_progress} restarts and {failing_s:.0f} s"
        if self._max_restarts is not None and self._restarts >= self._max_restarts:
            return f"there were {self._restarts}, and --max-restarts is {self._max_restarts}"
        return None

    def _record(self, kind: str, **details: object) -> None:
        """Write an event, later if the disk does not answer now."""
        row = {"time": time.time(), "attempt": self._events.attempt, **details}
        self._disk.ask(lambda: self._events.record(kind, **row))
