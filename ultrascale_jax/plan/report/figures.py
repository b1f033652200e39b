"""What a report shows, as numbers: `draw.py` draws them, `page.py` puts them on a page."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

WHOLE = "all parts"
"""Name of the part of a bar that is not divided."""


LOOP = "loop"
"""Kind of an event that stands for many iterations."""
VARIABLE = ("activation", "exposed", "bubble", "transfer", "stall", "waiting")
"""Words in the names of parts that a better configuration makes smaller: on top of a stack, in warm colours."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under a head; a number is right-aligned."""

    head: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Figure(ABC):
    """Anything with a picture; a subclass says what kind."""

    name: str
    """Of the PNG file and of the place on the page."""
    title: str
    caption: str
    """What is to be seen, and under which assumptions; also the text for who cannot see it."""

    @abstractmethod
    def table(self) -> Table:
        """The numbers of the picture."""

    @property
    def open(self) -> bool:
        """Whether the page shows the numbers at once."""
        return False


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One stack."""

    label: str
    parts: dict[str, float]
    """From the bottom up, in the unit of the figure."""
    note: str = ""

    def __post_init__(self):
        check_numbers(*self.parts.values())

    @property
    def total(self) -> float:
        """Height of the stack."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Bars(Figure):
    """Stacked bars in panels with a common height."""

    panels: Mapping[str, Sequence[Bar]]
    unit: str
    x: str
    limit: float | None = None
    """Height of a dashed line."""
    limit_name: str = ""

    @property
    def parts(self) -> list[str]:
        """The names of all parts from the bottom up: those of `VARIABLE` last, else as the longest stack has them."""
        bars = sorted((b for p in self.panels.values() for b in p), key=lambda b: -len(b.parts))
        names = dict.fromkeys(part for bar in bars for part in bar.parts)
        return sorted(names, key=is_variable)

    def largest(self, part: str) -> float:
        """Of all stacks, the height of the part."""
        return max(bar.parts.get(part, 0.0) for bars in self.panels.values() for bar in bars)

    def table(self) -> Table:
        parts = self.parts
        rows = [
            (panel, bar.label, *(bar.parts.get(p, 0.0) for p in parts), bar.total, bar.note)
            for panel, bars in self.panels.items()
            for bar in bars
        ]
        head = ("", self.x, *(f"{p} ({self.unit})" for p in parts), f"total ({self.unit})", "")
        return Table(head=head, rows=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of a line or of a cloud."""

    x: float
    y: float
    solid: bool = True
    """False draws it hollow: the figure says what that means."""
    note: str = ""

    def __post_init__(self):
        check_numbers(self.x, self.y)


@dataclass(frozen=True, kw_only=True)
class Lines(Figure):
    """Panels of lines over powers of two."""

    panels: Mapping[str, Mapping[str, Sequence[Point]]]
    x: str
    y: str
    hollow: str = ""
    """What a hollow point means."""
    scale: Literal["all", "row", "none"] = "all"
    """Which panels have the same y axis; a row has three."""

    def table(self) -> Table:
        rows = [
            (panel, name, p.x, p.y, p.note if p.solid else f"{p.note} ({self.hollow})".strip())
            for panel, lines in self.panels.items()
            for name, points in lines.items()
            for p in points
        ]
        return Table(head=("", "line", self.x, self.y, "configuration"), rows=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """Points in groups; `x` and `y` are the titles of the axes."""

    x: str
    y: str
    groups: Mapping[str, Sequence[Point]]
    equal: bool = False
    """Both axes logarithmic with the same range, and a diagonal: prediction over measurement."""
    limit: float | None = None
    """Place of a dashed vertical line."""
    limit_name: str = ""


@dataclass(frozen=True, kw_only=True)
class Clouds(Figure):
    """Scatter plots side by side."""

    panels: Mapping[str, Cloud]
    hollow: str = ""
    """What a hollow point means."""
    sheet: Table | None = None
    """A table that says more than the points."""

    def table(self) -> Table:
        if self.sheet is not None:
            return self.sheet
        rows = [
            (panel, group, p.x, p.y, p.note)
            for panel, cloud in self.panels.items()
            for group, points in cloud.groups.items()
            for p in points
        ]
        axes = {(c.x, c.y) for c in self.panels.values()}
        x, y = axes.pop() if len(axes) == 1 else ("x", "y")
        return Table(head=("", "group", x, y, "configuration"), rows=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a heat map."""

    value: float
    text: str
    """Lines under the value."""


@dataclass(frozen=True, kw_only=True)
class Heat(Figure):
    """Cells by row and column, coloured by value within their row."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell]
    unit: str
    x: str
    absent: str = ""
    """Text of an empty cell."""

    def table(self) -> Table:
        places = [(row, column) for row in self.rows for column in self.columns]
        rows = [
            (*place, self.cells[place].value, self.cells[place].text.replace("\n", " "))
            for place in places
            if place in self.cells
        ]
        return Table(head=("", self.x, self.unit, "configuration"), rows=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class Event:
    """One operation of a stream, in seconds."""

    name: str
    start: float
    duration: float
    kind: str

    def __post_init__(self):
        check_numbers(self.start, self.duration)


@dataclass(frozen=True, kw_only=True)
class Streams(Figure):
    """A step: a row of operations for each stream."""

    streams: Mapping[str, Sequence[Event]]
    step_s: float

    @property
    def detail(self) -> tuple[float, float] | None:
        """Start and end of the part with the most operations between events of kind `loop`."""
        busiest = max(self.streams.values(), key=len, default=())
        loops = sorted((e.start, e.start + e.duration) for e in busiest if e.kind == LOOP)
        borders = [0.0, *(border for loop in loops for border in loop), self.step_s]
        parts = list(zip(borders[::2], borders[1::2], strict=True))
        chosen = max(parts, key=lambda part: sum(part[0] <= e.start < part[1] for e in busiest))
        return chosen if loops and chosen[1] > chosen[0] else None

    def table(self) -> Table:
        rows: dict[tuple[str, str], tuple[int, float]] = {}
        for stream, events in self.streams.items():
            for e in events:
                count, total = rows.get((stream, e.kind), (0, 0.0))
                rows[stream, e.kind] = count + 1, total + e.duration
        share = 100 / self.step_s if self.step_s else 0.0
        body = tuple(
            (stream, kind, count, 1e3 * total, share * total)
            for (stream, kind), (count, total) in rows.items()
        )
        head = ("stream", "kind", "operations", "time (ms)", "of the step (%)")
        return Table(head=head, rows=body)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a rank of a pipeline."""

    rank: int
    start: float
    duration: float
    kind: str
    """F, B or W."""
    microbatch: int
    chunk: int


@dataclass(frozen=True, kw_only=True)
class Pipeline(Figure):
    """A schedule: a row of operations for each rank."""

    operations: Sequence[Operation]
    ranks: int
    chunks: int
    """Stages of a rank."""
    width: float
    """Time of the whole step."""
    kinds: Mapping[str, str]
    """Kinds of operation, in words."""
    unit: str
    in_flight: Sequence[int]
    """Of each rank, most chunks at once between forward and backward pass."""

    def table(self) -> Table:
        rows = []
        for rank in range(self.ranks):
            busy = sum(e.duration for e in self.operations if e.rank == rank)
            idle = 100 * (1 - busy / self.width)
            rows.append((f"rank {rank}", busy, idle, self.in_flight[rank]))
        head = ("", f"busy ({self.unit})", "idle (%)", "most chunks in flight")
        return Table(head=head, rows=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class Sheet(Figure):
    """A table whose last numbers are ratios with a threshold at 1; the picture shows the ratios."""

    sheet: Table
    ratios: dict[str, float]
    x: str

    def table(self) -> Table:
        return self.sheet

    @property
    def open(self) -> bool:
        return True


def check_numbers(*values: Any) -> None:
    """Raises `ValueError` for a value that no axis can show: what is not a number, negative, infinite or nan."""
    for value in values:
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{value!r} is no size")


def is_variable(part: str) -> bool:
    """Whether the part belongs on top of a stack."""
    return any(word in part.lower() for word in VARIABLE)


def number(value: Any, fallback: str = "-") -> str:
    """A number as a reader wants it: three significant digits, thousands apart."""
    if isinstance(value, str):
        return value
    if value is None or value != value:
        return fallback
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return f"{value:.{digits}f}" if size >= 0.01 else f"{value:.2g}"
