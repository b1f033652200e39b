"""Account for the time of a run over all its restarts: every second falls into one class.

A process counts its own seconds by a clock that nobody sets, and writes the sums into its heartbeat
(`heartbeats/RANK`). Its rank's next process continues from there, and adds the seconds between the two, by the wall
clock. So the heartbeat of rank 0 holds the ledger of the run.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from ultrascale_jax.launch.events import is_number, parse_object
from ultrascale_jax.units import counted

HEARTBEATS = "heartbeats"
STACKS = "stacks"

CLASSES = {
    "productive": "steps done for the first time",
    "again": "steps done again, that a restart had lost",
    "start-up": "processes start, join, read the data and the checkpoint; and end",
    "compile": "the step is compiled, and run for the first time",
    "checkpoint": "waits for checkpoints",
    "data": "waits for batches",
    "evaluation": "held-out loss, comparisons of replicas, profiles, pauses of other hooks",
    "hang": "no progress, until the process has ended itself",
    "down": "between the end of one try and the start of the next",
}

OF_SECTION = {
    "start": "start-up",
    "restore": "start-up",
    "compile": "compile",
    "warm-up": "compile",
    "step": "productive",
    "data": "data",
    "save": "checkpoint",
    "evaluate": "evaluation",
    "compare": "evaluation",
    "profile": "evaluation",
    "hook": "evaluation",
    "end": "start-up",
}
"""Class of each section of the loop."""


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
            again = counted(self.steps_again, "step")
            text = f"{text}; {counted(self.restarts, 'restart')}, {again} again"
        return text

    def table(self) -> str:
        """Return one line a class, with its share and meaning."""
        lines = [
            f"{name:<12}{s:>12.1f} s{s / (self.total_s or 1.0):>8.1%}  {CLASSES[name]}"
            for name, s in self.seconds.items()
        ]
        total = f"{'total':<12}{self.total_s:>12.1f} s"
        done = f"{counted(self.steps, 'step')}, {self.steps_again} again, {counted(self.restarts, 'restart')}"
        return "\n".join([*lines, total, done])


@dataclass(frozen=True)
class Beat:
    """A heartbeat: one process's state, and its ledger up to its last progress."""

    pid: int
    step: int
    section: str
    progress: float
    """Time of the last progress, in unix seconds."""
    time: float
    """Time of the heartbeat: the process was alive."""
    done: bool
    """Whether the run's last step is done, so that the time from here on is none of the run."""
    ledger: Ledger


def read_beat(run_dir: Path, rank: int = 0) -> Beat | None:
    """Return the heartbeat of `rank`; None if it cannot be read."""
    try:
        row = parse_object((run_dir / HEARTBEATS / str(rank)).read_bytes())
        ledger = Ledger(**row["ledger"])
        values = {name: row[name] for name in Beat.__annotations__}
        numbers = [values[name] for name in ("pid", "step", "progress", "time")]
        numbers += [ledger.restarts, ledger.steps, ledger.steps_again]
        sound = [*ledger.seconds] == [*CLASSES] and values["section"] in OF_SECTION
        sound = sound and all(map(is_number, [*numbers, *ledger.seconds.values()]))
    except (OSError, TypeError, KeyError, AttributeError):
        return None
    return Beat(**values | {"ledger": ledger}) if sound else None


def read_ledger(run_dir: Path) -> Ledger:
    """Return a run's ledger from its start, or the last one with `checkpoint.resume=never`, to its last heartbeat."""
    beat = read_beat(run_dir)
    return Ledger() if beat is None else _up_to_the_end(run_dir, beat)[0]


def begun_again(run_dir: Path | None, rank: int, age_s: float) -> Ledger:
    """Return the ledger with which a process begins that was started `age_s` seconds ago; None: of a new run."""
    ledger, beat, now = Ledger(), run_dir and read_beat(run_dir, rank), time.time()
    if run_dir and beat:
        ledger, end = _up_to_the_end(run_dir, beat)
        # The run before may have been of this very process.
        age_s = min(age_s, max(0.0, now - end))
        ledger.seconds["down"] += 0.0 if beat.done else max(0.0, now - age_s - end)
        ledger.restarts += 1
    ledger.seconds["start-up"] += age_s
    return ledger


def _up_to_the_end(run_dir: Path, beat: Beat) -> tuple[Ledger, float]:
    """Return the ledger up to the end of the process of a heartbeat, and that time.

    A process that was killed in a step had done nothing since its last progress; in another section it was at work.
    """
    ledger, end = beat.ledger, beat.time
    if beat.section == "end":
        return ledger, end
    if hangs := [time for time in hung_at(run_dir) if time > beat.progress]:
        end = max(hangs)
        ledger.seconds["hang"] += end - beat.progress
    elif beat.section == "step":
        end = beat.progress
    else:
        ledger.seconds[OF_SECTION[beat.section]] += max(0.0, end - beat.progress)
    return ledger, end


def stacks_path(run_dir: Path, rank: int, attempt: int) -> Path:
    """Return the file for the stack traces of `rank`; it is empty unless the process hung."""
    return run_dir / STACKS / f"rank{rank}.attempt{attempt}.txt"


def hung_at(run_dir: Path) -> list[float]:
    """Return when processes wrote their stacks, because they made no progress, in unix seconds."""
    written = [path.stat() for path in (run_dir / STACKS).glob("*.txt")]
    return [status.st_mtime for status in written if status.st_size]
