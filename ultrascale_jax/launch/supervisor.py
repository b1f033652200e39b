"""Keep the processes of one host alive: start them, watch them, end them together and start them again.

When one process of a job dies, the others wait in a collective. So the supervisor ends all and starts all again, from
the newest checkpoint. If one makes no progress (see `watchdog`), it writes the process's stacks and kills it. SIGTERM
stops the run from the first moment on; a process that dies of it before its first heartbeat had nothing to save.

There is no restart after an exit code that says it would not help, after a signal to stop, if `events.jsonl` says that
another host's supervisor has ended, or when `TRIES` restarts in a row brought no new step and `GIVE_UP_S` seconds have
passed since the first failure of that row.

Every host has its own supervisor, and none talks to the others: the death of one host's processes ends the others' too,
by their heartbeats, and each supervisor restarts its own. So the number of the attempt may differ between hosts.

A thread reads and writes the run directory, whose disk may not answer. Meanwhile the supervisor takes no process for
stuck, passes signals on, and notices processes that die.
"""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ultrascale_jax.launch.events import ATTEMPT, Events, is_count, now, read_events, say
from ultrascale_jax.launch.exit_codes import HUNG, REFUSED, STOPPED
from ultrascale_jax.launch.goodput import read_ledger
from ultrascale_jax.launch.processes import ANSWER_S, DUMP_S, Child, Disk, dump, kill
from ultrascale_jax.launch.sigterm import listener
from ultrascale_jax.launch.watchdog import FIRST_S, Beat, last_sign, stacks_path

TRIES = 3
"""Restarts without a new step after which the run may be given up."""

GIVE_UP_S = 1800.0
"""Seconds without a new step, from the first failure on, after which it may: storage that fails over, a switch that is
started again and a network that is repaired take less."""

GRACE_S = 8.0
"""Seconds that the others have to end when one has died: they tell each other why, and then the user. One that is stuck
has them beyond its bound, for its own watchdog."""

SHORT_GRACE_S = 2.0
"""Seconds of grace after a kill: no other process knows the cause."""

READ_S = 60.0
"""Seconds to read all events of a long run."""

STOP_REQUESTED = "told to stop"

BACK_OFF_S = 1.0
LONGEST_BACK_OFF_S = 60.0


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
            command: what a process runs, given how many restarts there were.
            environments: asked before every start: the variables of each process.
            ranks: their numbers in the job.
            run_dir: where heartbeats, stacks and events are.
            max_restarts: give up after so many; none: as long as there is progress.
            give_up_s: give up when `TRIES` restarts or more, and so many seconds, have brought no new step.
            fresh: the run starts anew, whatever the run directory holds.
        """
        self._command, self._environments, self._ranks = command, environments, tuple(ranks)
        self._run_dir, self._max_restarts = run_dir, max_restarts
        self._give_up_s = give_up_s
        self._events = Events(run_dir, rank=None)
        self._disk, before = Disk(), read_events(run_dir)
        self._found = {_event_id(event) for event in before}
        attempts = [event.get("attempt") for event in before]
        self._first_attempt = 1 + max(filter(is_count, attempts), default=-1)
        self._furthest = 0 if fresh else int(last_sign(run_dir, self._ranks[0]).get("furthest", 0))
        self._children: list[Child] = []
        self._noted: list[Child] = []
        """Processes without progress whose end is recorded."""
        self._signals: list[int] = []
        self._forwarded = False

    def run(self) -> int:
        """Run until the run is done, stopped or given up; return the exit code that ended it, 0 if all are well."""
        before = listener()
        handled = {
            number: signal.signal(number, lambda number, _: self._signals.append(number))
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        if before is not None and before.received:
            self._signals.append(signal.SIGTERM)
        try:
            return self._run()
        finally:
            kill(self._living())
            for number, handler in handled.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        if self._signals:
            self._record("gave_up", ranks=self._ranks, reason=STOP_REQUESTED)
            self._say("told to stop before anything was started")
            return 0
        restarts, no_progress, failing_since = 0, 0, time.monotonic()
        while True:
            self._events.attempt = self._first_attempt + restarts
            self._start(restarts)
            first = self._watch()
            for child in self._children:
                child.drain_output()
            early = first is not None and self._stopped_early(first)
            code = 0 if first is None or early else first.exit_code
            codes = {str(child.rank): child.code for child in self._children}
            self._record("exit", ranks=self._ranks, codes=codes, before=self._last_sign())
            if first is None:
                self._say_ledger()
                return 0
            cause = "stopped by SIGTERM before the first step" if early else self._cause(first)
            if self._progressed() or not restarts:
                # The first attempt is no restart.
                no_progress, failing_since = 0, time.monotonic()
            else:
                no_progress += 1
            why_not = self._no_restart(
                code, restarts, no_progress, time.monotonic() - failing_since
            )
            self._say_ledger()
            if why_not is None:
                restarts += 1
                pause = min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2**no_progress)
                self._say(f"{cause}; restart {restarts} in {pause:.0f} s")
                until = time.monotonic() + pause
                while time.monotonic() < until and not self._signals:
                    time.sleep(0.1)
                why_not = STOP_REQUESTED if self._signals else self._disk.ask(self._ended_elsewhere)
            if why_not is not None:
                details = {"ranks": self._ranks, "reason": why_not, "cause": cause, "code": code}
                self._record("gave_up", **details)
                self._say(f"no restart: {why_not}")
                say(cause)
                return code

    def _no_restart(self, code: int, restarts: int, no_progress: int, lost_s: float) -> str | None:
        """Return why an attempt that ended with `code` is the last, `lost_s` after a new step; None: it is not."""
        if self._signals:
            return STOP_REQUESTED
        if code in (REFUSED, STOPPED):
            return f"exit code {code} says that it would not help"
        if no_progress >= TRIES and lost_s >= self._give_up_s:
            return f"no step beyond {self._furthest} in {no_progress} restarts and {lost_s:.0f} s"
        if self._max_restarts is not None and restarts >= self._max_restarts:
            return f"there were {restarts}, and --max-restarts is {self._max_restarts}"
        return None

    def _ended_elsewhere(self) -> str | None:
        """Return another supervisor of the job that ended since this one began and is not back, or None."""
        last: dict[str, dict] = {}
        for event in read_events(self._run_dir):
            own = event.get("ranks") == list(self._ranks)
            if event["kind"] in ("spawn", "exit", "gave_up") and not own:
                last[str(event.get("ranks"))] = event
        for ranks, event in last.items():
            codes = event.get("codes")
            done = event["kind"] == "exit" and isinstance(codes, dict) and not any(codes.values())
            if (done or event["kind"] == "gave_up") and _event_id(event) not in self._found:
                why = "it is done" if done else event.get("reason")
                return f"the supervisor of ranks {ranks} on {event.get('host')} has ended: {why}"
        return None

    def _progressed(self) -> bool:
        """Return whether the attempt did a step that none before it had done."""
        beats = (self._beats(self._children) or {}).values()
        reached = max((beat.furthest for beat in beats if beat is not None), default=0)
        progressed = reached > self._furthest
        self._furthest = max(self._furthest, reached)
        return progressed

    def _start(self, restarts: int) -> None:
        self._record("spawn", ranks=self._ranks, before=self._last_sign())
        own = {
            ATTEMPT: str(self._events.attempt),
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
        }
        command, is_only = self._command(restarts), len(self._ranks) == 1
        self._children, self._noted = [], []
        for rank, environ in zip(self._ranks, self._environments(), strict=True):
            plain = rank == 0 or is_only
            self._children.append(Child(rank, command, {**environ, **own}, plain=plain))

    def _watch(self) -> Child | None:
        """Watch until all processes are gone; return the one that failed first, if any."""
        first: Child | None = None
        deadline, looked = float("inf"), time.monotonic()
        while living := self._living():
            self._forward()
            self._note_hangs()
            if first is None and (first := self._failed()) is not None:
                deadline = time.monotonic() + (SHORT_GRACE_S if _was_killed(first) else GRACE_S)
            if time.monotonic() > deadline:
                self._end(living)
            elif time.monotonic() > looked + 1.0:
                looked = time.monotonic()
                beats = self._beats(living) or {}
                late = [child for child in beats if self._is_stuck(child, beats[child], GRACE_S)]
                if late:
                    self._end(late)
            time.sleep(0.1)
        self._note_hangs()
        return first or self._failed()

    def _note_hangs(self) -> None:
        """Record the processes that have ended themselves at their limit, in C, without a word to `events.jsonl`."""
        for child in self._children:
            if child.code != HUNG or child in self._noted:
                continue
            beat = (self._beats([child]) or {}).get(child)
            if beat is None or not self._is_stuck(child, beat, 0.0):
                continue
            self._noted.append(child)
            self._record(
                "hang",
                of=child.rank,
                section=beat.section,
                step=beat.step,
                waited_s=time.monotonic() - beat.monotonic,
                bound_s=beat.bound_s,
                stacks=str(stacks_path(self._run_dir, child.rank, self._events.attempt)),
            )

    def _failed(self) -> Child | None:
        """Return the process that failed, if any: the first that a signal killed, because the others died of that."""
        dead = [child for child in self._children if child.code]
        if not dead:
            return None
        first = min(dead, key=lambda child: (child.code or 0, child.rank))
        self._record("died", of=first.rank, code=first.code)
        return first

    def _stopped_early(self, first: Child) -> bool:
        """Return whether the signal to stop killed `first`, which could not listen yet."""
        beats = self._beats([first])
        deaf = beats is not None and beats[first] is None
        return bool(self._signals) and first.code == -signal.SIGTERM and deaf

    def _living(self) -> list[Child]:
        return [child for child in self._children if child.code is None]

    def _beats(self, children: Sequence[Child]) -> dict[Child, Beat | None] | None:
        """Return their newest heartbeats; none if the disk does not answer."""
        return self._disk.ask(lambda: {child: child.beat(self._run_dir) for child in children})

    def _last_sign(self) -> dict[str, Any] | None:
        return self._disk.ask(lambda: last_sign(self._run_dir, self._ranks[0]))

    def _record(self, kind: str, **details: object) -> None:
        """Write an event, later if the disk does not answer now."""
        row = {**now(), "attempt": self._events.attempt, **details}
        self._disk.ask(lambda: self._events.record(kind, **row))

    def _is_stuck(self, child: Child, beat: Beat | None, grace_s: float) -> bool:
        if beat is None:
            return time.monotonic() > child.started + FIRST_S["start"] + grace_s
        return time.monotonic() > beat.monotonic + beat.bound_s + grace_s

    def _end(self, children: list[Child]) -> None:
        """Write the stacks of processes that are stuck, or do not end with the others, and kill them."""
        beats = self._beats(children) or dict.fromkeys(children)
        states = {child: child.state for child in children}
        stuck = {
            child
            for child, beat in beats.items()
            if states[child] == "T" or self._is_stuck(child, beat, 0.0)
        }
        attempt = self._events.attempt
        files = {child: stacks_path(self._run_dir, child.rank, attempt) for child in children}
        asked = {child: files[child] for child in children if beats[child] is not None}
        dumps = self._disk.ask(lambda: dump(asked), DUMP_S + ANSWER_S) or {}
        kill(children)
        self._noted += children
        for child, beat in beats.items():
            details: dict[str, object] = {"of": child.rank, "state": states[child]}
            if beat is not None:
                waited = time.monotonic() - beat.monotonic
                details |= {"section": beat.section, "step": beat.step, "waited_s": waited}
            if child in dumps:
                details["stacks"] = str(dumps[child])
            self._record("stuck" if child in stuck else "left", **details)
            said = _stuck(details) if child in stuck else f"is left over {_where(details)}"
            self._say(f"rank {child.rank} {said}: it is killed")

    def _forward(self) -> None:
        """Pass the signal on once, so that all save and stop; a second Ctrl-C kills them."""
        if self._signals and not self._forwarded:
            self._forwarded = True
            self._record("told", signal=signal.Signals(self._signals[0]).name)
            for child in self._children:
                child.signal(signal.SIGTERM)
        if self._signals.count(signal.SIGINT) > 1:
            kill(self._living())

    def _cause(self, first: Child) -> str:
        """Return the cause of the attempt's end in one line, as far as it is known."""
        if _was_killed(first) and not first.killed:
            return f"rank {first.rank} was killed by {signal.Signals(-(first.code or 0)).name}"
        events = self._disk.ask(lambda: read_events(self._run_dir), READ_S) or []
        events = [event for event in events if event.get("attempt") == self._events.attempt]
        failures = [event for event in events if event["kind"] == "failure"]
        for event in sorted(failures, key=lambda event: event.get("first") is not True):
            return f"rank {event.get('rank')}: {event.get('summary')}"
        hung = [event for event in events if event["kind"] in ("hang", "stuck")]
        # A stopped process held up the others.
        for event in sorted(hung, key=lambda event: event.get("state") != "T"):
            return f"rank {event.get('of', event.get('rank'))} {_stuck(event)}"
        why = "; its error stands above" if first.exit_code in (REFUSED, STOPPED) else ""
        return f"rank {first.rank} ended with exit code {first.exit_code}{why}"

    def _say_ledger(self) -> None:
        ledger = self._disk.ask(lambda: read_ledger(self._run_dir), READ_S)
        if ledger is not None:
            self._say(ledger.line())

    def _say(self, text: str) -> None:
        say(f"supervisor: {text}")


def _event_id(event: Mapping[str, object]) -> str:
    """Return a key that identifies an event."""
    return f"{event['time']} {event.get('host')} {event.get('pid')}"


def _was_killed(child: Child) -> bool:
    """Return whether a signal of another process ended it, rather than its own abort()."""
    code = child.code or 0
    return code < 0 and code != -signal.SIGABRT


def _stuck(event: Mapping[str, object]) -> str:
    """Return a `hang` or `stuck` event as a sentence."""
    stopped = "is stopped by a signal" if event.get("state") == "T" else "makes no progress"
    return f"{stopped} {_where(event)}"


def _where(event: Mapping[str, object]) -> str:
    where = "before its first heartbeat"
    if "section" in event:
        where = f"in section {event['section']} after step {event.get('step')}"
    kept = f" (stacks: {event['stacks']})" if "stacks" in event else ""
    return f"{where}{kept}"
