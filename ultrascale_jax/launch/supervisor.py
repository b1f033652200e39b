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
from dataclasses import dataclass
from pathlib import Path

from ultrascale_jax.launch.disk import Disk
from ultrascale_jax.launch.events import ATTEMPT, Events, is_count, read_events, say
from ultrascale_jax.launch.exit_codes import HUNG, REFUSED, STOPPED
from ultrascale_jax.launch.goodput import Beat, read_beat, read_ledger, stacks_path
from ultrascale_jax.launch.processes import Child, kill

TRIES = 3
"""Restarts without a new step after which the run may be given up."""

GIVE_UP_S = 1800.0
"""Seconds without a new step, from the first failure on, after which it may: most outages of storage take less."""

STOP_REQUESTED = "told to stop"

BACK_OFF_S = 1.0
LONGEST_BACK_OFF_S = 60.0

GRACE_S = 8.0
"""Seconds that the others have to end when one has died: they tell each other why, and then the user."""

READ_S = 60.0
"""Seconds to read all events of a long run."""


@dataclass
class Supervisor:
    """The processes of a run on this host."""

    command: Callable[[int], Sequence[str]]
    """Returns the command line of a process, from the number of restarts."""
    environments: Callable[[], Sequence[Mapping[str, str]]]
    """Called before every start: the variables of each process."""
    ranks: Sequence[int]
    """Numbers of the processes in the job."""
    run_dir: Path
    """Where heartbeats, stacks and events are."""
    max_restarts: int | None = None
    """Give up after so many; none: as long as there is progress."""
    give_up_s: float = GIVE_UP_S
    """Give up when `TRIES` restarts or more, and so many seconds, have brought no new step."""
    signals: Sequence[int] = ()
    """SIGTERM and SIGINT as this process gets them; a `SignalListener` adds to them."""

    def __post_init__(self):
        self._events, self._disk = Events(self.run_dir, rank=None), Disk()
        attempts = [event.get("attempt") for event in read_events(self.run_dir)]
        self._events.attempt = 1 + max(filter(is_count, attempts), default=-1)
        self._furthest = 0
        """The most steps that the run had done when a process failed."""
        self._restarts, self._no_progress, self._failing_since = 0, 0, time.monotonic()
        self._children: list[Child] = []

    def run(self) -> int:
        """Run until the run is done, stopped or given up; return the exit code that ended it, 0 if all are well."""
        try:
            return self._run()
        finally:
            kill(self._children)

    def _run(self) -> int:
        code, cause = 0, "supervisor: told to stop before anything was started"
        why_not = STOP_REQUESTED if self.signals else None
        while why_not is None:
            self._start()
            first = self._wait()
            self._record("exit", ranks=self.ranks, codes={c.rank: c.code for c in self._children})
            beats = [self._beat(child) for child in self._children]
            ledger = self._disk.ask(lambda: read_ledger(self.run_dir), READ_S)
            if ledger is not None:
                say(f"supervisor: {ledger.line()}")
            if first is None:
                return 0
            code, cause = self._cause(first)
            reached = max((beat.ledger.steps for beat in beats if beat), default=0)
            why_not = self._why_no_restart(code, reached) or self._pause(cause)
        self._record("gave_up", ranks=self.ranks, reason=why_not, cause=cause, code=code)
        say(f"supervisor: no restart: {why_not}")
        say(cause)
        return code

    def _pause(self, cause: str) -> str | None:
        """Wait before a restart; return why there is none after all, if a signal says so meanwhile."""
        self._restarts += 1
        pause_s = min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2**self._no_progress)
        say(f"supervisor: {cause}; restart {self._restarts} in {pause_s:.0f} s")
        until = time.monotonic() + pause_s
        while time.monotonic() < until:
            if self.signals:
                return STOP_REQUESTED
            time.sleep(0.1)
        self._events.attempt += 1
        return None

    def _start(self) -> None:
        self._record("spawn", ranks=self.ranks)
        variables = {ATTEMPT: str(self._events.attempt)}
        variables |= {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
        command = self.command(self._restarts)
        self._children = []
        for rank, environ in zip(self.ranks, self.environments(), strict=True):
            plain = rank == 0 or len(self.ranks) == 1
            # Each is listed before the next is started, so that an error meanwhile leaves no process running.
            self._children.append(Child(rank, command, {**environ, **variables}, plain=plain))

    def _wait(self) -> Child | None:
        """Wait until all processes are gone; return the first that failed, if any."""
        first: Child | None = None
        deadline, forwarded = math.inf, False
        while living := [child for child in self._children if child.code is None]:
            if self.signals and not forwarded:
                # Once, so that all save and stop; a second Ctrl-C kills them.
                forwarded = True
                self._record("told", signal=signal.Signals(self.signals[0]).name)
                for child in living:
                    child.signal(signal.SIGTERM)
            if first is None and (first := self._failed()) is not None:
                deadline = time.monotonic() + GRACE_S
            if time.monotonic() > deadline or self.signals.count(signal.SIGINT) > 1:
                kill(living)
            time.sleep(0.1)
        first = first or self._failed()
        for child in self._children:
            child.drain_output()
        return first

    def _failed(self) -> Child | None:
        """Return the process that failed, if any: the first that a signal killed, because the others died of that."""
        dead = [child for child in self._children if child.code]
        first = min(dead, key=lambda child: (child.code or 0, child.rank), default=None)
        if first is not None:
            self._record("died", of=first.rank, code=first.code)
        return first

    def _beat(self, child: Child) -> Beat | None:
        """Return the newest heartbeat of a process; None before its first, and if the disk does not answer."""
        beat = self._disk.ask(lambda: read_beat(self.run_dir, child.rank))
        return beat if beat is not None and beat.pid == child.process.pid else None

    def _cause(self, first: Child) -> tuple[int, str]:
        """Return the exit code of the run, and the cause of the processes' end in one line, as far as it is known."""
        rank, code, beat = f"rank {first.rank}", first.exit_code, self._beat(first)
        if self.signals and first.code == -signal.SIGTERM and beat is None:
            # It could not listen yet.
            return 0, "stopped by SIGTERM before the first step"
        if first.was_killed:
            return code, f"{rank} was killed by {signal.Signals(-(first.code or 0)).name}"
        stacks = stacks_path(self.run_dir, first.rank, self._events.attempt)
        if first.code == HUNG and beat and self._disk.ask(lambda: stacks.stat().st_size):
            where = {"section": beat.section, "step": beat.step, "stacks": str(stacks)}
            self._record("hang", of=first.rank, **where)
            words = f"in section {beat.section} after step {beat.step} (stacks: {stacks})"
            return code, f"{rank} made no progress {words}"
        events = self._disk.ask(lambda: read_events(self.run_dir), READ_S) or []
        failure = "failure", self._events.attempt
        failures = [event for event in events if (event["kind"], event.get("attempt")) == failure]
        for event in sorted(failures, key=lambda event: event.get("first") is not True):
            return code, f"rank {event.get('rank')}: {event.get('summary')}"
        return code, f"{rank} ended with exit code {code}"

    def _why_no_restart(self, code: int, reached: int) -> str | None:
        """Return why an attempt that ended with `code`, and the run after `reached` steps, is the last, or None."""
        if reached > self._furthest or not self._restarts:
            self._furthest, self._no_progress, self._failing_since = reached, 0, time.monotonic()
        else:
            self._no_progress += 1
        failing_s = time.monotonic() - self._failing_since
        if self.signals:
            return STOP_REQUESTED
        if code in (REFUSED, STOPPED):
            return f"exit code {code} says that it would not help"
        if self._no_progress >= TRIES and failing_s >= self.give_up_s:
            return f"no new step in {self._no_progress} restarts and {failing_s:.0f} s"
        if self.max_restarts is not None and self._restarts >= self.max_restarts:
            return f"there were {self._restarts}, and --max-restarts is {self.max_restarts}"
        return None

    def _record(self, kind: str, **details: object) -> None:
        """Write an event, later if the disk does not answer now."""
        row = {"time": time.time(), "attempt": self._events.attempt, **details}
        self._disk.ask(lambda: self._events.record(kind, **row))
