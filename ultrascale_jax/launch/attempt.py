"""Watch the processes of one start of a run until all are gone, and tell why they ended.

When one process of a job dies, the others wait in a collective, so all are ended. One that makes no progress ends
itself (`watchdog.py`); one that is stopped is told to write its stacks and to go on, and then killed, as what is left.

A thread reads and writes the run directory, whose disk may not answer. Meanwhile no process is taken for stuck; signals
are passed on, and processes that die are noticed.
"""

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ultrascale_jax.launch.events import read_events, say
from ultrascale_jax.launch.exit_codes import HUNG, REFUSED, STOPPED
from ultrascale_jax.launch.processes import Child, Disk, kill
from ultrascale_jax.launch.watchdog import DUMP_SIGNAL, FIRST_S, Beat, stacks_path

GRACE_S = 8.0
"""Seconds that the others have to end when one has died: they tell each other why, and then the user. One that is stuck
has them beyond its bound, for its own watchdog."""

SHORT_GRACE_S = 2.0
"""Seconds of grace after a kill: no other process knows the cause."""

WAKE_S = 3.0
"""Seconds that a process that was stopped has to write its stacks when it goes on."""

READ_S = 60.0
"""Seconds to read all events of a long run."""


class Record(Protocol):
    """Writes an event of the supervisor."""

    def __call__(self, kind: str, **details: object) -> None: ...


class Attempt:
    """The processes of one start."""

    def __init__(
        self, run_dir: Path, number: int, disk: Disk, signals: Sequence[int], record: Record
    ):
        """
        Args:
            run_dir: where heartbeats, stacks and events are.
            number: how often the run was started before.
            disk: does all that is done with `run_dir`.
            signals: those that the supervisor has got, while it gets them.
            record: writes events.
        """
        self.children: list[Child] = []
        self._run_dir, self._number, self._disk = run_dir, number, disk
        self._signals, self._record = signals, record
        self._forwarded = False
        self._noted: list[Child] = []
        """Processes without progress whose end is recorded."""

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
        beats = self._beats(self.children).values()
        return max((beat.furthest for beat in beats if beat is not None), default=0)

    def watch(self) -> tuple[int, str | None]:
        """Watch until all processes are gone; return the exit code of the first that failed, and the cause, if any."""
        first: Child | None = None
        deadline, looked = float("inf"), time.monotonic()
        while living := self.living:
            self._forward()
            if first is None and (first := self._failed()) is not None:
                deadline = time.monotonic() + (SHORT_GRACE_S if _was_killed(first) else GRACE_S)
            if time.monotonic() > deadline:
                self._end(living)
            elif time.monotonic() > looked + 1.0:
                looked = time.monotonic()
                beats = self._beats(living)
                late = [child for child, beat in beats.items() if _is_stuck(child, beat, GRACE_S)]
                if late:
                    self._end(late)
            time.sleep(0.1)
        first = first or self._failed()
        for child in self.children:
            child.drain_output()
        if first is None:
            return 0, None
        deaf = self._signals and self._beats([first]).get(first, first) is None
        if deaf and first.code == -signal.SIGTERM:
            # It could not listen yet.
            return 0, "stopped by SIGTERM before the first step"
        return first.exit_code, self._cause(first)

    def _failed(self) -> Child | None:
        """Return the process that failed, if any: the first that a signal killed, because the others died of that."""
        self._note_hangs()
        dead = [child for child in self.children if child.code]
        if not dead:
            return None
        first = min(dead, key=lambda child: (child.code or 0, child.rank))
        self._record("died", of=first.rank, code=first.code)
        return first

    def _beats(self, children: Sequence[Child]) -> dict[Child, Beat | None]:
        """Return their newest heartbeats; empty if the disk does not answer."""
        ask = {child: child.beat for child in children}
        beats = self._disk.ask(lambda: {child: beat(self._run_dir) for child, beat in ask.items()})
        return beats or {}

    def _note_hangs(self) -> None:
        """Record the processes that have ended themselves at their limit: `faulthandler` writes no event."""
        ended = [
            child for child in self.children if child.code == HUNG and child not in self._noted
        ]
        for child, beat in self._beats(ended).items() if ended else ():
            if beat is not None and _is_stuck(child, beat, 0.0):
                self._note("hang", child, beat)

    def _note(self, kind: str, child: Child, beat: Beat | None, **details: object) -> str:
        """Record the end of a process without progress, and return it as a sentence."""
        self._noted.append(child)
        details["of"] = child.rank
        if beat is not None:
            details |= {"section": beat.section, "step": beat.step, "bound_s": beat.bound_s}
            details["waited_s"] = time.monotonic() - beat.monotonic
            if kind != "left":
                details["stacks"] = str(stacks_path(self._run_dir, child.rank, self._number))
        self._record(kind, **details)
        return _sentence(kind, details)

    def _end(self, children: Sequence[Child]) -> None:
        """Kill processes that are stuck, or do not end with the others."""
        beats = dict.fromkeys(children) | self._beats(children)
        states = {child: child.state for child in children}
        stopped = [child for child in children if states[child] == "T"]
        for child in stopped:
            child.signal(DUMP_SIGNAL)
            child.signal(signal.SIGCONT)
        until = time.monotonic() + WAKE_S
        while any(child.code is None for child in stopped) and time.monotonic() < until:
            time.sleep(0.1)
        kill(children)
        for child, beat in beats.items():
            stuck = child in stopped or _is_stuck(child, beat, 0.0)
            told = self._note("stuck" if stuck else "left", child, beat, state=states[child])
            say(f"supervisor: rank {child.rank} {told}: it is killed")

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
        hung = [event for event in events if event["kind"] in ("hang", "stuck")]
        # A stopped process held up the others.
        for event in sorted(hung, key=lambda event: event.get("state") != "T"):
            return f"rank {event.get('of')} {_sentence(event['kind'], event)}"
        why = "; its error stands above" if first.exit_code in (REFUSED, STOPPED) else ""
        return f"rank {first.rank} ended with exit code {first.exit_code}{why}"


def _is_stuck(child: Child, beat: Beat | None, grace_s: float) -> bool:
    if beat is None:
        return time.monotonic() > child.started + FIRST_S["start"] + grace_s
    return time.monotonic() > beat.monotonic + beat.bound_s + grace_s


def _was_killed(child: Child) -> bool:
    """Return whether a signal of another process ended it, rather than its own abort()."""
    code = child.code or 0
    return code < 0 and code != -signal.SIGABRT


def _sentence(kind: str, event: Mapping[str, object]) -> str:
    """Return what a `hang`, `stuck` or `left` event says of its process."""
    told = "is left over" if kind == "left" else "makes no progress"
    if event.get("state") == "T":
        told = "is stopped by a signal"
    where = "before its first heartbeat"
    if "section" in event:
        where = f"in section {event['section']} after step {event.get('step')}"
    kept = f" (stacks: {event['stacks']})" if "stacks" in event else ""
    return f"{told} {where}{kept}"
