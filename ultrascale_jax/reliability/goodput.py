"""Where the time of a run went, over all its restarts: every second in one class.

The ledger is read from `events.jsonl`. Rank 0 writes an event whenever it changes what it does, and the supervisor of
its host when it starts and when it is gone; from one of these to the next, time is of one class, so that the classes
sum to the whole by construction. Two things are not events: a process that is killed says nothing, so its last sign of
life (its heartbeat file, or the last row of `metrics.jsonl`) ends what it did; and waits for batches, which happen in
every step, are counted by the process itself and taken out of its steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ultrascale_jax.reliability.events import is_number, read_events
from ultrascale_jax.reliability.watchdog import last_sign

CLASSES = {
    "productive": "steps done for the first time",
    "again": "steps done again, that a restart had lost",
    "start-up": "processes start, join, read the data and the checkpoint; and end",
    "compile": "the step is compiled, and run for the first time",
    "checkpoint": "waits for checkpoints",
    "data": "waits for batches",
    "evaluation": "held-out loss, comparisons of replicas, profiles",
    "hang": "no progress, or waiting to be ended",
    "down": "between the end of one try and the start of the next",
}
"""What a second can be, and what it means."""

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
}

STEPS = ("productive", "again")


@dataclass
class Ledger:
    """The time of a run by class."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    restarts: int = 0
    """How often a process was started after the first."""
    steps: int = 0
    """Steps done at least once."""
    steps_again: int = 0
    """Steps done again."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Share of productive steps in all time; 0 of nothing."""
        return self.seconds["productive"] / self.total_s if self.total_s else 0.0

    def line(self) -> str:
        """All of it, in one line: what took a tenth of a second or more."""
        told = [f"{name} {s:.1f} s" for name, s in self.seconds.items() if s >= 0.05]
        words = f"goodput {self.goodput:.1%} of {self.total_s:.1f} s: {', '.join(told)}"
        if not self.restarts:
            return words
        return (
            f"{words}; {_count(self.restarts, 'restart')}, {_count(self.steps_again, 'step')} again"
        )

    def table(self) -> str:
        """One line a class, with its share and meaning."""
        lines = [
            f"{name:<12}{s:>12.1f} s{s / (self.total_s or 1.0):>8.1%}  {CLASSES[name]}"
            for name, s in self.seconds.items()
        ]
        total = f"{'total':<12}{self.total_s:>12.1f} s"
        done = f"{_count(self.steps, 'step')}, {self.steps_again} again, {_count(self.restarts, 'restart')}"
        return "\n".join([*lines, total, done])


def read_ledger(run_dir: Path) -> Ledger:
    """The ledger of a run from its start, or from the last start with `checkpoint.resume=never`, to its last sign."""
    events = list(_of_rank_0(read_events(run_dir)))
    starts = [n for n, event in enumerate(events) if event["kind"] == "start"]
    fresh = [n for n in starts if events[n].get("fresh")]
    # A supervisor's `spawn` is of the start that comes next.
    begin = fresh[-1] if fresh else 0
    if fresh and begin and events[begin - 1]["kind"] == "spawn":
        begin -= 1
    book = _Book(Ledger())
    for event in events[begin:]:
        book.turn(event)
    book.close(last_sign(run_dir))
    return book.ledger


class _Book:
    """Keeps a ledger while events are read in their order."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self._now: float | None = None
        """Up to where time is booked; none before the first event."""
        self._class: str | None = None
        """What the time from there on is; none: not of the run."""
        self._alive, self._hung = False, False
        """Whether rank 0 is between its `start` and its `end`, and whether it, or another one, was stuck there."""
        self._ended: dict | None = None
        """The `end` of a process that its supervisor has not yet seen go."""
        self._begun, self._step, self._waited_s = False, 0, 0.0

    def turn(self, event: dict) -> None:
        """Book the time up to `event`, and what it says of the time after it."""
        kind, time = event["kind"], event["time"]
        if kind in ("spawn", "start"):
            self._dies(event.get("before"), "down")
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
            self._dies(event.get("before"), "hang")
            self._to(time, self._after_end())
            self._ended = None

    def _after_end(self) -> str | None:
        """What the time is after a process has gone by itself: after the last step nobody waits for a next one."""
        done = self._ended is not None and self._ended.get("reason") == "done"
        return None if done else "down"

    def close(self, sign: dict) -> None:
        """The last event has been read; `sign` is the last sign of life."""
        self._dies(sign, None)

    def _progress(self, sign: dict) -> None:
        """Steps done, and waits for batches since the last event: the waits are taken out of the steps."""
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

    def _dies(self, sign: object, then: str | None) -> None:
        """Rank 0 is gone without an `end`, after its last `sign`; what follows is of class `then`.

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
        """Book the time up to `time` in the class at hand; what follows is of class `then`."""
        if self._now is not None and self._class is not None:
            self.ledger.seconds[self._class] += max(0.0, time - self._now)
        # A clock that was set back makes no time.
        self._now = time if self._now is None else max(self._now, time)
        self._class = then


def _of_rank_0(events: list[dict]) -> Iterator[dict]:
    """The events that tell of rank 0's time: its own, and those of the supervisor that runs it."""
    for event in events:
        ranks = event.get("ranks")
        supervised = event["kind"] in ("spawn", "exit") and isinstance(ranks, list) and 0 in ranks
        own = event["kind"] in ("start", "section", "end") and event.get("rank") == 0
        if supervised or own or event["kind"] in ("hang", "stuck"):
            yield event


def _number(value: object, otherwise: float) -> float:
    """`value` if a process can have written it, or else `otherwise`."""
    return float(value) if is_number(value) else otherwise


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
