"""Divide the time of a device among its work, the communication that nothing hides, and nothing at all.

At every moment a device does one of these, in this order:

* it computes: the moment is that of the kernels that run, in equal parts;
* it communicates: the moment is exposed, and belongs to the collectives that run;
* it copies on another stream than the compute stream: the moment is a wait for copies;
* nothing runs: the device idles, for the host or for another device.

So the parts add up to the step, as they do in the planner's timeline (`plan/compiled/timeline.py`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

WORK, COLLECTIVE, COPY, IDLE = range(4)
"""Kinds of moments, in the order in which a moment is given to one."""


class Label(NamedTuple):
    """A kind of event."""

    moment: int
    """`WORK`, `COLLECTIVE` or `COPY`; `IDLE` if there is no event."""
    kind: str = ""
    """Class of the kernels (`hlo/classes.py`), or kind of the collective."""
    where: str = ""
    """Block of the model, or the collective's axes, as `fsdp*sp`."""


NOTHING = Label(IDLE)


class Span(NamedTuple):
    """One event."""

    start_s: float
    end_s: float
    label: Label


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Where one device spent one step; seconds."""

    step_s: float
    work_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By class of kernel and block."""
    collective_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Time of all collectives, hidden or not, by kind and axes."""
    exposed_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Time of the collectives that nothing hid, by kind and axes."""
    copies_s: float = 0.0
    """The device waited for copies."""
    idle_s: float = 0.0

    def by(self, part: int) -> dict[str, float]:
        """Sum `work_s` by class of kernel (0) or by block (1), most time first."""
        return _sums(self.work_s, part)

    def exposed_by_axes(self) -> dict[str, float]:
        """Sum `exposed_s` by axes, most time first."""
        return _sums(self.exposed_s, 1)


def _sums(seconds: Mapping[tuple[str, str], float], part: int) -> dict[str, float]:
    """Sum by one part of the key, the largest sum first."""
    sums: dict[str, float] = defaultdict(float)
    for key, amount in seconds.items():
        sums[key[part]] += amount
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def divide(spans: Iterable[Span], steps: int) -> Breakdown:
    """Divide the time from the first event to the last among all events, and by `steps`, of a device."""
    edges = sorted(
        edge
        for span in spans
        for edge in ((span.start_s, 1, span.label), (span.end_s, -1, span.label))
    )
    parts: dict[Label, float] = defaultdict(float)
    running: list[Counter[Label]] = [Counter(), Counter(), Counter()]
    total: dict[Label, float] = defaultdict(float)
    last = edges[0][0] if edges else 0.0
    for at, change, label in edges:
        if at > last:
            _give(at - last, running, parts)
        for at_work, count in running[COLLECTIVE].items():
            total[at_work] += count * (at - last)
        last = at
        running[label.moment][label] += change
        if not running[label.moment][label]:
            del running[label.moment][label]

    def of(moment: int, sums: Mapping[Label, float]) -> dict[tuple[str, str], float]:
        return {(k.kind, k.where): s / steps for k, s in sums.items() if k.moment == moment}

    return Breakdown(
        step_s=(last - edges[0][0]) / steps if edges else 0.0,
        work_s=of(WORK, parts),
        collective_s=of(COLLECTIVE, total),
        exposed_s=of(COLLECTIVE, parts),
        copies_s=sum(of(COPY, parts).values()),
        idle_s=parts[NOTHING] / steps,
    )


def _give(seconds: float, running: list[Counter[Label]], parts: dict[Label, float]) -> None:
    """Give a moment to the labels that it belongs to."""
    for labels in running:
        if labels:
            count = labels.total()
            for label, many in labels.items():
                parts[label] += seconds * many / count
            return
    parts[NOTHING] += seconds


def mean(breakdowns: Iterable[Breakdown]) -> Breakdown:
    """Return the mean over devices."""
    every = list(breakdowns)

    def of(mappings: Iterable[Mapping[tuple[str, str], float]]) -> dict[tuple[str, str], float]:
        sums: dict[tuple[str, str], float] = defaultdict(float)
        for mapping in mappings:
            for key, seconds in mapping.items():
                sums[key] += seconds / len(every)
        return dict(sums)

    return Breakdown(
        step_s=sum(b.step_s for b in every) / len(every),
        work_s=of(b.work_s for b in every),
        collective_s=of(b.collective_s for b in every),
        exposed_s=of(b.exposed_s for b in every),
        copies_s=sum(b.copies_s for b in every) / len(every),
        idle_s=sum(b.idle_s for b in every) / len(every),
    )
