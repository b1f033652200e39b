"""Wait for the processes of one start of a run until all are gone, and tell why they ended.

When one process of a job dies, the others wait in a collective, so all are ended. One that makes no progress ends
itself (`watchdog.py`). Only one that is stopped by a signal cannot: signals make it write its stacks and continue, and
it is killed with the others, or after `STOPPED_S`.
"""

import math
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ultrascale_jax.launch.events import read_events, say
from ultrascale_jax.launch.exit_codes import HUNG, REFUSED, STOPPED
from ultrascale_jax.launch.processes import Child, Disk, kill
from ultrascale_jax.launch.watchdog import DUMP_SIGNAL, read_beat, stacks_path

GRACE_S = 8.0
"""Seconds that the others have to end when one has died: they tell each other why, and then the user."""

SHORT_GRACE_S = 2.0
"""Seconds of grace after a kill: no other process knows the cause."""

STOPPED_S = 60.0
"""Seconds for which a process may be stopped by a signal while no other has ended."""

WAKE_S = 3.0
"""Seconds that a process that was stopped has to write its stacks when it continues."""

READ_S = 60.0
"""Seconds to read all events of a long run."""


class Attempt:
    """The processes of one start."""

    def __init__(
        self,
        run_dir: Path,
        number: int,
        disk: Disk,
        signals: Sequence[int],
        record: Callable[..., None],
    ):
        """
        Args:
            run_dir: where heartbeats, stacks and events are.
            number: how often the run was started before.
            disk: does all that is done with `run_dir`.
            signals: the numbers of signals that the supervisor has received; the list grows.
            record: writes an event of a kind with its details.
        """
        self.children: list[Child] = []
        self._run_dir, self._number, self._disk = run_dir, number, disk
        self._signals, self._record = signals, record
        self._forwarded = False
        self._stuck: dict[Child, str] = {}
        """Processes without progress, with a sentence about each; stopped ones come first."""

    @property
    def living(self) -> list[Child]:
        """Return the processes that have not ended."""
        return [child for child in self.children if child.code is None]

    @property
    def codes(self) -> dict[str, int | None]:
        """Return the exit code of each rank."""
        return {str(child.rank): child.code for child in self.children}

    def furthest(self) -> int:
        """Return the most steps that the run had done when the processes ended."""
        return max((self._beat(child).get("furthest", 0) for child in self.children), default=0)

    def wait(self) -> tuple[int, str | None]:
        """Wait until all processes are gone; return the exit code of the first that failed, and the cause, if any."""
        first: Child | None = None
        deadline = math.inf
        while living := self.living:
            self._forward()
            if first is None and (first := self._failed()) is not None:
                deadline = time.monotonic() + (SHORT_GRACE_S if _was_killed(first) else GRACE_S)
            stopped = [child for child in living if (child.stopped_s() or 0.0) > STOPPED_S]
            self._end(living if time.monotonic() > deadline else stopped)
            time.sleep(0.1)
        first = first or self._failed()
        for child in self.children:
            child.drain_output()
        if first is None:
            return 0, None
        if self._signals and first.code == -signal.SIGTERM and not self._beat(first):
            # It could not listen yet.
            return 0, "stopped by SIGTERM before the first step"
        return first.exit_code, self._cause(first)

    def _failed(self) -> Child | None:
        """Return the process that failed, if any: the first that a signal killed, because the others died of that."""
        dead = [child for child in self.children if child.code]
        if not dead:
            return None
        for child in dead:
            beat = self._beat(child) if child.code == HUNG and child not in self._stuck else {}
            if beat and time.monotonic() > beat["monotonic"] + beat["bound_s"]:
                # `faulthandler` ended it at its limit, and writes no event.
                self._note("hang", child)
        first = min(dead, key=lambda child: (child.code or 0, child.rank))
        self._record("died", of=first.rank, code=first.code)
        return first

    def _beat(self, child: Child) -> dict:
        """Return the newest heartbeat of a process; empty before its first, and if the disk does not answer."""
        beat = self._disk.ask(lambda: read_beat(self._run_dir, child.rank))
        return vars(beat) if beat is not None and beat.pid == child.process.pid else {}

    def _note(self, kind: str, child: Child) -> None:
        """Record a process that made no progress."""
        beat, place, details = self._beat(child), "before its first heartbeat", {}
        if beat:
            stacks = str(stacks_path(self._run_dir, child.rank, self._number))
            place = f"in section {beat['section']} after step {beat['step']} (stacks: {stacks})"
            details = {name: beat[name] for name in ("section", "step", "bound_s")}
            details |= {"waited_s": time.monotonic() - beat["monotonic"], "stacks": stacks}
        self._record(kind, of=child.rank, **details)
        fault = "is stopped by a signal" if kind == "stuck" else "makes no progress"
        sentence = {child: f"rank {child.rank} {fault} {place}"}
        self._stuck = sentence | self._stuck if kind == "stuck" else self._stuck | sentence

    def _end(self, children: Sequence[Child]) -> None:
        """Kill processes; stopped ones write their stacks first."""
        stopped = [child for child in children if child.stopped_s() is not None]
        for child in stopped:
            child.signal(DUMP_SIGNAL)
            child.signal(signal.SIGCONT)
        until = time.monotonic() + WAKE_S
        while any(child.code is None for child in stopped) and time.monotonic() < until:
            time.sleep(0.1)
        kill(children)
        for child in stopped:
            self._note("stuck", child)
            say(f"supervisor: {self._stuck[child]}: it is killed")

    def _forward(self) -> None:
        """Pass the signal on once, so that all save and stop; a second Ctrl-C kills them."""
        if self._signals and not self._forwarded:
            self._forwarded = True
            self._record("told", signal=signal.Signals(self._signals[0]).name)
            for child in self.children:
                child.signal(signal.SIGTERM)
        if self._signals.count(signal.SIGINT) > 1:
            kill(self.living)

    def _cause(self, first: Child) -> str:
        """Return the cause of the attempt's end in one line, as far as it is known."""
        if _was_killed(first) and not first.killed:
            return f"rank {first.rank} was killed by {signal.Signals(-(first.code or 0)).name}"
        events = self._disk.ask(lambda: read_events(self._run_dir), READ_S) or []
        events = [event for event in events if event.get("attempt") == self._number]
        failures = [event for event in events if event["kind"] == "failure"]
        for event in sorted(failures, key=lambda event: event.get("first") is not True):
            return f"rank {event.get('rank')}: {event.get('summary')}"
        for sentence in self._stuck.values():
            return sentence
        why = "; its error stands above" if first.exit_code in (REFUSED, STOPPED) else ""
        return f"rank {first.rank} ended with exit code {first.exit_code}{why}"


def _was_killed(child: Child) -> bool:
    """Return whether a signal of another process ended it, rather than its own abort()."""
    code = child.code or 0
    return code < 0 and code != -signal.SIGABRT
