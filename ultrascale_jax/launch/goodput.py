"""Account for the time of a run over all its restarts: every second falls into one class.

The ledger comes from `events.jsonl`. Rank 0 writes an event whenever it changes what it does, and its supervisor when
it starts and when it is gone. The time between two of these events is of one class, so the classes sum to the whole by
construction. A process that is killed writes nothing: its last heartbeat ends what it did. The process itself counts
its waits for batches, which are subtracted from its steps.

Time is of the machine's monotonic clock, so setting a clock changes nothing. Between two boots, or two machines, only
the wall clocks can tell; if the second is behind the first, that gap is zero.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

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
    clock_set_s: list[float] = field(default_factory=list)
    """Seconds by which the clock was set, each time; the ledger counts none of it."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Return the share of productive steps in all time; 0 without any time."""
        return self.seconds["productive"] / self.total_s if self.total_s else 0.0

    def line(self) -> str:
        """Return all classes that took a tenth of a second or more, in one line."""
        told = [f"{name} {s:.1f} s" for name, s in self.seconds.items() if s >= 0.05]
        words = f"goodput {self.goodput:.1%} of {self.total_s:.1f} s: {', '.join(told)}"
        if self.restarts:
            again = _count(self.steps_again, "step")
            words = f"{words}; {_count(self.restarts, 'restart')}, {again} again"
        return "; ".join([words, *self._notes()])

    def _notes(self) -> list[str]:
        if not self.clock_set_s:
            return []
        by = ", ".join(f"{seconds:+.0f} s" for seconds in self.clock_set_s[:8])
        return [f"the clock was set {_count(len(self.clock_set_s), 'time')} ({by}), uncounted"]

    def table(self) -> str:
        """Return one line a class, with its share and meaning."""
        lines = [
            f"{name:<12}{s:>12.1f} s{s / (self.total_s or 1.0):>8.1%}  {CLASSES[name]}"
            for name, s in self.seconds.items()
        ]
        total = f"{'total':<12}{self.total_s:>12.1f} s"
        done = f"{_count(self.steps, 'step')}, {self.steps_again} again, {_count(self.restarts, 'restart')}"
        return "\n".join([*lines, total, done, *self._notes()])


def read_ledger(run_dir: Path) -> Ledger:
    """Return a run's ledger from its start, or from the last start with `checkpoint.resume=never`, to its last sign."""
    events = list(_of_rank_0(read_events(run_dir)))
    starts = [n for n, event in enumerate(events) if event["kind"] == "start"]
    fresh = [n for n in starts if events[n].get("fresh")]
    # A supervisor's `spawn` is of the start that comes next.
    begin = fresh[-1] if fresh else 0
    if fresh and begin and events[begin - 1]["kind"] == "spawn":
        begin -= 1
    book, clock = _Book(Ledger()), _Clock()
    dated = [clock.dated(event) for event in events[begin:]]
    # The supervisor writes when the disk answers, which may be after what came later.
    for event in sorted(dated, key=lambda event: event["time"]):
        book.turn(event)
    book.dies(clock.sign(last_sign(run_dir)), None)
    book.ledger.clock_set_s = clock.set_s
    return book.ledger


class _Clock:
    """Converts the times of events, in the order of their file, to one clock that nobody sets."""

    def __init__(self):
        self.set_s: list[float] = []
        """Seconds by which the wall clock was set, each time."""
        self._offsets: dict[str, float] = {}
        """For each boot: the difference of its monotonic clock to the one here."""
        self._wall: dict[str, tuple[float, float]] = {}
        """For each boot: the last monotonic time, and its difference to the wall clock."""
        self._boot: str | None = None
        self._latest, self._shift = -math.inf, 0.0

    def dated(self, event: dict) -> dict:
        """Return the event with its times on this clock."""
        if event["kind"] in ("hang", "stuck"):
            # They may be another machine's, and only their place matters.
            return event | {"time": self._latest}
        boot, monotonic = _stamp(event)
        before = event.get("before")
        before = self.sign(before) if isinstance(before, dict) else {}
        age = max(0.0, event["time"] - _number(event.get("began"), event["time"]))
        if boot != self._boot:
            # A process begins after the last sign of the one before, whatever the two machines' clocks say.
            floor = self._latest
            if before and (seen := _stamp(before)[0]) and seen in self._offsets:
                floor = max(floor, before["time"])
            offset = self._offsets.get(boot, event["time"] - monotonic)
            self._offsets[boot] = offset + max(0.0, floor + age - monotonic - offset)
        now = monotonic + self._offsets[boot]
        self._notice_setting(boot, monotonic, event["time"] - monotonic)
        self._boot, self._latest = boot, max(self._latest, now)
        self._shift = now - event["time"]
        if before:
            before["time"] = min(before["time"], now)
        return event | {"time": now, "began": now - age, "before": before}

    def sign(self, sign: dict) -> dict:
        """Return a last sign of life with its time on this clock; empty if it has none."""
        if not is_number(sign.get("time")):
            return {}
        boot, monotonic = _stamp(sign)
        known = boot and boot in self._offsets
        time = monotonic + self._offsets[boot] if known else sign["time"] + self._shift
        return sign | {"time": time}

    def _notice_setting(self, boot: str, monotonic: float, offset: float) -> None:
        before, known = self._wall.get(boot, (monotonic, offset))
        # A clock that is slewed gains or loses less than a thousandth.
        if boot and abs(offset - known) > 1.0 + 1e-3 * abs(monotonic - before):
            self.set_s.append(offset - known)
        self._wall[boot] = (monotonic, offset)


def _stamp(row: dict) -> tuple[str, float]:
    """Return a row's boot and the seconds since then; for rows without them, nothing and their time."""
    boot, monotonic = row.get("boot"), row.get("monotonic")
    if isinstance(boot, str) and boot and is_number(monotonic):
        return boot, float(monotonic)
    return "", float(row["time"])


class _Book:
    """Builds a ledger from events in their order."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self._now: float | None = None
        """The time up to which seconds are booked; None before the first event."""
        self._class: str | None = None
        """The class of the time from there on; None if it is not of the run."""
        self._alive, self._hung = False, False
        """Whether rank 0 is between its `start` and its `end`, and whether it, or another rank, was stuck there."""
        self._ended: dict | None = None
        """The `end` of a process whose exit its supervisor has not yet seen."""
        self._begun, self._step, self._waited_s = False, 0, 0.0

    def turn(self, event: dict) -> None:
        """Book the time up to `event`, and set the class of the time after it."""
        kind, time = event["kind"], event["time"]
        if kind in ("spawn", "start"):
            self.dies(event.get("before"), "down")
            if self._ended is not None:
                # Nobody saw the process go.
                self._class, self._ended = self._after_end(), None
            if self._class != "start-up":
                self._to(min(time, _number(event.get("began"), time)), "start-up")
                self.ledger.restarts += self._begun
                self._begun = True
            if kind == "start":
                self._alive, self._hung, self._waited_s = True, False, 0.0
        elif kind == "section":
            self._progress(event)
            self._to(time, OF_SECTION.get(str(event.get("name")), "hang"))
        elif kind == "end":
            self._progress(event)
            self._to(time, "start-up")
            self._alive, self._ended = False, event
        elif kind in ("hang", "stuck"):
            self._hung = True
        elif kind == "exit":
            self.dies(event.get("before"), "hang")
            self._to(time, self._after_end())
            self._ended = None

    def _after_end(self) -> str | None:
        """Return the class of the time after a process ended by itself: None after the last step."""
        done = self._ended is not None and self._ended.get("reason") == "done"
        return None if done else "down"

    def _progress(self, sign: dict) -> None:
        """Book steps, less the waits for batches since the last event."""
        waited = _number(sign.get("data_wait_s"), self._waited_s)
        new, self._waited_s = max(0.0, waited - self._waited_s), waited
        if self._now is not None and self._class in (*STEPS, "compile"):
            new = min(new, max(0.0, sign["time"] - self._now))
            self.ledger.seconds["data"] += new
            self._now += new
        step = int(_number(sign.get("step"), self._step))
        if self._class == "again":
            self.ledger.steps_again += max(0, step - self._step)
        self._step = step
        self.ledger.steps = max(self.ledger.steps, step)

    def dies(self, sign: object, then: str | None) -> None:
        """Book that rank 0 is gone without an `end`, after its last `sign`; the time after is of class `then`.

        A section other than steps has no signs inside: unless it hung, it lasted until rank 0 was gone.
        """
        if not self._alive:
            return
        self._alive = False
        if isinstance(sign, dict) and _number(sign.get("time"), 0.0) > (self._now or 0.0):
            self._progress(sign)
            self._to(sign["time"], self._class)
        if then != "hang" or self._hung or self._class in STEPS:
            self._class = then

    def _to(self, time: float, then: str | None) -> None:
        """Book the time up to `time` in the present class; the time after is of class `then`."""
        if self._now is not None and self._class is not None:
            self.ledger.seconds[self._class] += max(0.0, time - self._now)
        # A clock that was set back makes no time.
        self._now = time if self._now is None else max(self._now, time)
        self._class = then


def _of_rank_0(events: list[dict]) -> Iterator[dict]:
    """Return the events of rank 0's time: its own, and those of the supervisor that runs it."""
    for event in events:
        ranks = event.get("ranks")
        supervised = event["kind"] in ("spawn", "exit") and isinstance(ranks, list) and 0 in ranks
        own = event["kind"] in ("start", "section", "end") and event.get("rank") == 0
        if supervised or own or event["kind"] in ("hang", "stuck"):
            yield event


def _number(value: object, otherwise: float) -> float:
    """Return `value` if a process can have written it, or else `otherwise`."""
    return float(value) if is_number(value) else otherwise


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
