"""Account for the time of a run over all its restarts: every second falls into one class.

The ledger comes from `events.jsonl`. Rank 0 writes an event whenever it changes what it does, and its supervisor when
it starts and when it is gone; the time between two of these events is of one class. A process that is killed writes
nothing: its last heartbeat ends what it did. Its waits for batches, which it counts itself, are taken off its steps.

Seconds within one boot of a machine are its monotonic clock's, which nobody sets; between two boots, or two machines,
the wall clocks', at least zero.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ultrascale_jax.launch.events import is_number, read_events
from ultrascale_jax.launch.watchdog import last_sign

CLASSES = {
    "productive": "steps done for the first time",
    "again": "steps done again, that a restart had lost",
    "start-up": "processes start, join, read the data and the checkpoint; and end",
    "compile": "the step is compiled, and run for the first time",
    "checkpoint": "waits for checkpoints",
    "data": "waits for batches",
    "evaluation": "held-out loss, comparisons of replicas, profiles, pauses of other hooks",
    "hang": "no progress, or waiting to be ended",
    "down": "between the end of one try and the start of the next",
}

OF_SECTION = {
    "start": "start-up",
    "restore": "start-up",
    "compile": "compile",
    "warm-up": "compile",
    "step": "productive",
    "again": "again",
    "save": "checkpoint",
    "evaluate": "evaluation",
    "compare": "evaluation",
    "profile": "evaluation",
    "hook": "evaluation",
    "end": "start-up",
}

STEPS = ("productive", "again")


@dataclass
class Ledger:
    """The time of a run by class."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    restarts: int = 0
    """Number of starts after the first."""
    steps: int = 0
    """Steps done at least once."""
    steps_again: int = 0
    """Steps done again."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Return the share of productive steps in all time; 0 without any time."""
        return self.seconds["productive"] / self.total_s if self.total_s else 0.0

    def line(self) -> str:
        """Return all classes that took a tenth of a second or more, in one line."""
        classes = [f"{name} {s:.1f} s" for name, s in self.seconds.items() if s >= 0.05]
        text = f"goodput {self.goodput:.1%} of {self.total_s:.1f} s: {', '.join(classes)}"
        if self.restarts:
            again = _count(self.steps_again, "step")
            text = f"{text}; {_count(self.restarts, 'restart')}, {again} again"
        return text

    def table(self) -> str:
        """Return one line a class, with its share and meaning."""
        lines = [
            f"{name:<12}{s:>12.1f} s{s / (self.total_s or 1.0):>8.1%}  {CLASSES[name]}"
            for name, s in self.seconds.items()
        ]
        total = f"{'total':<12}{self.total_s:>12.1f} s"
        done = f"{_count(self.steps, 'step')}, {self.steps_again} again, {_count(self.restarts, 'restart')}"
        return "\n".join([*lines, total, done])


def read_ledger(run_dir: Path) -> Ledger:
    """Return a run's ledger from its start, or from the last start with `checkpoint.resume=never`, to its last sign."""
    events = list(_of_rank_0(read_events(run_dir)))
    fresh = [n for n, event in enumerate(events) if event["kind"] == "start" and event.get("fresh")]
    begin = fresh[-1] if fresh else 0
    if begin and events[begin - 1]["kind"] == "spawn":
        begin -= 1  # by the supervisor, of this start
    book = _Book()
    # The supervisor writes when the disk answers, which may be after later events.
    for _, events_of_boot in itertools.groupby(
        events[begin:], key=lambda event: Moment.of(event).boot
    ):
        for event in sorted(events_of_boot, key=lambda event: Moment.of(event).clock):
            book.enter(event)
    book.die(last_sign(run_dir), None)
    return book.ledger


class Moment(NamedTuple):
    """A moment by the clocks of a machine."""

    boot: str
    """The boot of the machine; empty if it is not known."""
    clock: float
    """Seconds since that boot, or if it is not known the unix time."""
    time: float
    """Unix time, by a clock that somebody may set."""

    @classmethod
    def of(cls, row: dict) -> "Moment":
        """Return the moment of an event or a heartbeat, which has a `time`."""
        boot, clock, time = row.get("boot"), row.get("monotonic"), float(row["time"])
        has_boot = isinstance(boot, str) and boot and is_number(clock)
        return cls(str(boot), float(clock or 0.0), time) if has_boot else cls("", time, time)

    def before(self, seconds: float) -> "Moment":
        return Moment(self.boot, self.clock - seconds, self.time - seconds)

    def since(self, earlier: "Moment") -> float:
        """Return the seconds from `earlier` to here; negative if it is later by one machine's clock."""
        if self.boot == earlier.boot:
            return self.clock - earlier.clock
        return max(0.0, self.time - earlier.time)


class _Book:
    """Builds a ledger from events in their order."""

    def __init__(self):
        self.ledger = Ledger()
        self._now: Moment | None = None
        """The moment up to which seconds are booked; None before the first event."""
        self._class: str | None = None
        """The class of the time from there on; None if it is not of the run."""
        self._alive, self._hung = False, False
        """Whether rank 0 is between its `start` and its `end`, and whether it, or another rank, was stuck there."""
        self._end: dict | None = None
        """The `end` of a process whose exit its supervisor has not yet seen."""
        self._begun, self._step, self._waited_s = False, 0, 0.0

    def enter(self, event: dict) -> None:
        """Book the time up to `event`, and set the class of the time after it."""
        kind, now = event["kind"], Moment.of(event)
        if kind in ("spawn", "start"):
            self.die(event.get("before"), "down")
            if self._end is not None:
                # Nobody saw the process go.
                self._class, self._end = self._class_after_end(), None
            if self._class != "start-up":
                self._book(now.before(max(0.0, _number(event.get("age_s"), 0.0))), "start-up")
                self.ledger.restarts += self._begun
                self._begun = True
            if kind == "start":
                self._alive, self._hung, self._waited_s = True, False, 0.0
        elif kind == "section":
            self._progress(event, OF_SECTION.get(str(event.get("name")), "hang"))
        elif kind == "end":
            self._progress(event, "start-up")
            self._alive, self._end = False, event
        elif kind in ("hang", "stuck"):
            self._hung = True
        elif kind == "exit":
            self.die(event.get("before"), "hang")
            self._book(now, self._class_after_end())
            self._end = None

    def die(self, sign: object, then: str | None) -> None:
        """Book that rank 0 is gone without an `end`, after its last `sign`; the time after is of class `then`.

        A section other than steps has no signs inside: unless it hung, it lasted until rank 0 was gone.
        """
        if not self._alive:
            return
        self._alive = False
        if isinstance(sign, dict) and is_number(sign.get("time")):
            self._progress(sign, self._class)
        if then != "hang" or self._hung or self._class in STEPS:
            self._class = then

    def _class_after_end(self) -> str | None:
        """Return the class of the time after a process ended by itself: None after the last step."""
        done = self._end is not None and self._end.get("reason") == "done"
        return None if done else "down"

    def _progress(self, sign: dict, then: str | None) -> None:
        """Book the steps up to `sign`, and of their time what was spent waiting for batches as such."""
        of_steps, passed = self._class, self._book(Moment.of(sign), then)
        waited = _number(sign.get("data_wait_s"), self._waited_s)
        new, self._waited_s = min(max(0.0, waited - self._waited_s), passed), waited
        if of_steps is not None and of_steps in (*STEPS, "compile"):
            self.ledger.seconds["data"] += new
            self.ledger.seconds[of_steps] -= new
        step = int(_number(sign.get("step"), self._step))
        if of_steps == "again":
            self.ledger.steps_again += max(0, step - self._step)
        self._step = step
        self.ledger.steps = max(self.ledger.steps, step)

    def _book(self, now: Moment, then: str | None) -> float:
        """Book the time up to `now` in the present class; the time after is of class `then`. Return its seconds."""
        passed = 0.0 if self._now is None else now.since(self._now)
        if self._class is not None:
            self.ledger.seconds[self._class] += max(0.0, passed)
        if self._now is None or passed >= 0.0:
            self._now = now
        self._class = then
        return max(0.0, passed)


def _of_rank_0(events: list[dict]) -> Iterator[dict]:
    """Yield the events that rank 0 and its supervisor wrote, and hangs of any rank."""
    latest: dict = {}
    for event in events:
        ranks = event.get("ranks")
        supervised = event["kind"] in ("spawn", "exit") and isinstance(ranks, list) and 0 in ranks
        by_rank_0 = event["kind"] in ("start", "section", "end") and event.get("rank") == 0
        if supervised or by_rank_0:
            latest = event
            yield event
        elif event["kind"] in ("hang", "stuck"):
            # Another machine's clock may have written it: only its place among the others counts.
            yield {**latest, "kind": event["kind"], "time": latest.get("time", event["time"])}


def _number(value: object, otherwise: float) -> float:
    """Return `value` if a process can have written it, or else `otherwise`."""
    return float(value) if is_number(value) else otherwise


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
