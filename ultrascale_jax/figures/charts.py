"""Figures of sizes: stacked bars, lines, clouds of points, a heat map, and a table of ratios."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul
from typing import Any, ClassVar, Literal

from ultrascale_jax.figures.figure import (
    Figure,
    Table,
    check_numbers,
    grid,
    legend,
    number,
    resize,
    rows_of,
)
from ultrascale_jax.figures.palette import (
    INK,
    MARKERS,
    PAPER,
    SERIES,
    WARM,
    colours,
    is_variable,
)

CLIP = 2.5
"""A stack higher than so many times the limit is cut, and its height written on it."""

INVISIBLE = 0.002
"""A part that is smaller than this share of the axis in all stacks is left to the table."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One stack."""

    label: str
    parts: Mapping[str, float]
    """From the bottom up, in the unit of the figure."""
    note: str = ""
    text: str = ""
    """Over the stack, in place of its height."""

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
        """The names of all parts from the bottom up: variable ones last, else as the longest stack has them."""
        bars = sorted((b for p in self.panels.values() for b in p), key=lambda b: -len(b.parts))
        names = dict.fromkeys(part for bar in bars for part in bar.parts)
        return sorted(names, key=is_variable)

    def table(self) -> Table:
        parts = self.parts
        rows = [
            (panel, bar.label, *(bar.parts.get(p, 0.0) for p in parts), bar.total, bar.note)
            for panel, bars in self.panels.items()
            for bar in bars
        ]
        head = ("", self.x, *(f"{p} ({self.unit})" for p in parts), f"total ({self.unit})", "")
        return Table(head=head, rows=tuple(rows))

    def paint(self, canvas: Any) -> None:
        every = [bar for bars in self.panels.values() for bar in bars]
        columns = 4 if max(map(len, self.panels.values())) <= 7 else 2
        widths = [max(2, len(bars)) for bars in self.panels.values()]
        axes = grid(canvas, len(self.panels), 3.3, columns, widths=widths)
        highest = max(bar.total for bar in every)
        top = 1.12 * (min(highest, CLIP * self.limit) if self.limit else highest)
        top = max(top, 1.08 * (self.limit or 0)) or 1.0
        largest = {p: max(bar.parts.get(p, 0.0) for bar in every) for p in self.parts}
        look = colours([part for part, size in largest.items() if size > INVISIBLE * top])
        for n, (ax, (panel, bars)) in enumerate(zip(axes, self.panels.items(), strict=True)):
            _stack(ax, bars, look, top)
            side = 0.6 + max(0, 3 - len(bars)) / 3
            ax.set(ylim=(0, top), xlim=(-side, len(bars) - 1 + side), title=panel, xlabel=self.x)
            labels, turn = [bar.label for bar in bars], {}
            if _crowded(bars, min(columns, len(self.panels))):
                labels = [label.replace("\n", " ") for label in labels]
                turn = {"rotation": 25, "ha": "right"}
            ax.set_xticks(range(len(bars)), labels, **turn)
            ax.tick_params(axis="x", length=0)
            if self.limit is not None:
                line = ax.axhline(self.limit, color=INK, linestyle="--", linewidth=1)
                line.set_label(self.limit_name)
            ax.yaxis.set_major_formatter("{x:,g}")
            if n % columns == 0:
                ax.set_ylabel(self.unit)
        legend(canvas, axes[0], reverse=len(look))


@dataclass(frozen=True, kw_only=True)
class Areas(Figure):
    """Stacked areas over a line: sizes that change at given points."""

    starts: Sequence[float]
    """Points of the x axis from which on each column of `parts` holds."""
    end: float
    """End of the last column."""
    parts: Mapping[str, Sequence[float]]
    """From the bottom up, in the unit of the figure."""
    x: str
    unit: str
    limit: float | None = None
    """Height of a dashed line."""
    limit_name: str = ""

    def __post_init__(self):
        check_numbers(
            self.end, *self.starts, *(size for row in self.parts.values() for size in row)
        )
        for row in self.parts.values():
            if len(row) != len(self.starts):
                raise ValueError(f"{len(row)} sizes of {len(self.starts)} points")

    height = 4.2
    """Height of the picture in inches."""

    @property
    def peak(self) -> int:
        """The column with the highest stack."""
        totals = [sum(column) for column in zip(*self.parts.values(), strict=True)]
        return max(range(len(totals)), key=totals.__getitem__, default=0)

    def table(self) -> Table:
        widths = [b - a for a, b in pairwise([*self.starts, self.end])]
        rows = [
            (part, row[self.peak], sum(map(mul, row, widths)) / sum(widths), max(row))
            for part, row in self.parts.items()
            if row
        ]
        head = ("", *(f"{name} ({self.unit})" for name in ("at the peak", "mean", "most")))
        return Table(head=head, rows=tuple(rows))

    def paint(self, canvas: Any) -> None:
        (ax,) = grid(canvas, 1, 3.6, 1)
        resize(canvas, 10.5, self.height)
        highest = max(map(max, self.parts.values()), default=0.0)
        look = colours([part for part, row in self.parts.items() if max(row) > INVISIBLE * highest])
        at = [*self.starts, self.end]
        floor = [0.0] * len(at)
        for part, (colour, hatch) in look.items():
            row = self.parts[part]
            heights = [a + b for a, b in zip(floor, (*row, row[-1]), strict=True)]
            style = {"facecolor": colour, "hatch": hatch, "edgecolor": PAPER, "linewidth": 0}
            ax.fill_between(at, floor, heights, step="post", label=part, **style)
            floor = heights
        top = max(floor)
        if self.limit is not None:
            line = ax.axhline(self.limit, color=INK, linestyle="--", linewidth=1)
            line.set_label(self.limit_name)
            top = max(top, self.limit)
        box = {"boxstyle": "square,pad=0.1", "facecolor": PAPER, "edgecolor": "none"}
        place = self.starts[self.peak], max(floor)
        style = {"ha": "center", "va": "top", "fontsize": 7, "bbox": box}
        ax.annotate(number(max(floor)), place, (0, -4), textcoords="offset points", **style)
        ax.set(xlim=(at[0], self.end), ylim=(0, 1.1 * top), xlabel=self.x, ylabel=self.unit)
        ax.xaxis.set_major_formatter("{x:,g}")
        handles, labels = ax.get_legend_handles_labels()
        canvas.legend(handles[::-1], labels[::-1], loc="outside right upper")


def _stack(ax: Any, bars: Sequence[Bar], look: Mapping[str, tuple[str, str]], top: float) -> None:
    """Draw the stacks of one panel, each with its total over it, or inside it where it is cut."""
    floor = [0.0] * len(bars)
    for part, (colour, hatch) in look.items():
        heights = [bar.parts.get(part, 0.0) for bar in bars]
        style = {"color": colour, "hatch": hatch, "edgecolor": PAPER, "linewidth": 0.4}
        ax.bar(range(len(bars)), heights, 0.72, floor, label=part, **style)
        floor = [a + b for a, b in zip(floor, heights, strict=True)]
    box = {"boxstyle": "square,pad=0.1", "facecolor": PAPER, "edgecolor": "none"}
    style = {"ha": "center", "fontsize": 7, "bbox": box}
    for x, bar in enumerate(bars):
        text, y = bar.text or number(bar.total), min(bar.total, top)
        if bar.total > top * 0.985:
            ax.text(x, 0.985 * y, f"↑{text}", va="top", **style)
        else:
            ax.text(x, y + 0.012 * top, text, va="bottom", **style)


def _crowded(bars: Sequence[Bar], columns: int) -> bool:
    widths = [max(map(len, bar.label.splitlines()), default=0) for bar in bars]
    return sum(width + 2 for width in widths) > 150 / columns


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


def _name_groups(ax: Any, names: Sequence[str], hollow: str, **style: Any) -> None:
    """Add entries of the legend: a marker for each name, and the meaning of a hollow point."""
    for rank, name in enumerate(names):
        look = {"marker": MARKERS[rank % len(MARKERS)], **style}
        ax.plot([], [], color=SERIES[rank % len(SERIES)], label=name, **look)
    if hollow:
        empty = {"color": INK, "markerfacecolor": PAPER, "linestyle": "none"}
        ax.plot([], [], marker="o", label=hollow, **empty)


@dataclass(frozen=True, kw_only=True)
class Lines(Figure):
    """Panels of lines over powers of two."""

    panels: Mapping[str, Mapping[str, Sequence[Point]]]
    x: str
    y: str
    hollow: str = ""
    """Meaning of a hollow point."""
    scale: Literal["all", "row", "none"] = "all"
    """Panels that share a y axis; a row has three."""
    log: bool = False
    """A logarithmic y axis."""
    limit: float | None = None
    """Height of a dashed line."""
    limit_name: str = ""

    def table(self) -> Table:
        rows = [
            (panel, name, p.x, p.y, p.note if p.solid else f"{p.note} ({self.hollow})".strip())
            for panel, lines in self.panels.items()
            for name, points in lines.items()
            for p in points
        ]
        return Table(head=("", "line", self.x, self.y, "configuration"), rows=tuple(rows))

    def paint(self, canvas: Any) -> None:
        columns = 2 if len(self.panels) == 4 else 3
        axes = grid(canvas, len(self.panels), 3.2, columns, self.scale)
        names = list(dict.fromkeys(name for lines in self.panels.values() for name in lines))
        tops: dict[int, float] = {}
        for n, (ax, (panel, lines)) in enumerate(zip(axes, self.panels.items(), strict=True)):
            points = [p for line in lines.values() for p in line]
            for name, line in lines.items():
                _line(ax, names.index(name), line)
            if points:
                _powers(ax, [p.x for p in points])
            ax.set(title=panel, xlabel=self.x)
            if n % columns == 0:
                ax.set_ylabel(self.y)
            if self.log:
                ax.set_yscale("log")
            else:
                group = {"all": 0, "row": n // columns, "none": n}[self.scale]
                top = max((p.y for p in points), default=1.0)
                tops[group] = max(tops.get(group, 0.0), 1.07 * top)
                ax.set_ylim(0, tops[group])
            ax.yaxis.set_major_formatter("{x:,g}")
            if self.limit is not None:
                line = ax.axhline(self.limit, color=INK, linestyle="--", linewidth=1)
                line.set_label(self.limit_name)
        every = [p for lines in self.panels.values() for line in lines.values() for p in line]
        hollow = "" if all(p.solid for p in every) else self.hollow
        _name_groups(axes[0], names, hollow, markersize=5)
        legend(canvas, axes[0])


def _line(ax: Any, rank: int, points: Sequence[Point]) -> None:
    colour, marker = SERIES[rank % len(SERIES)], MARKERS[rank % len(MARKERS)]
    ax.plot([p.x for p in points], [p.y for p in points], color=colour, linewidth=1.5)
    for p in points:
        face = colour if p.solid else PAPER
        ax.plot(p.x, p.y, marker, color=colour, markerfacecolor=face, markersize=5)


def _powers(ax: Any, values: Sequence[float]) -> None:
    """Make the x axis logarithmic, with a tick at every value."""
    ax.set_xscale("log", base=2)
    ticks = sorted(set(values))
    ax.set_xticks(ticks, [number(tick) for tick in ticks])
    ax.set_xticks([], minor=True)


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
    """Meaning of a hollow point."""
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

    def paint(self, canvas: Any) -> None:
        axes = grid(canvas, len(self.panels), 4.0, 3, share=False)
        names = list(dict.fromkeys(name for cloud in self.panels.values() for name in cloud.groups))
        for ax, (panel, cloud) in zip(axes, self.panels.items(), strict=True):
            for name, points in cloud.groups.items():
                colour = SERIES[names.index(name) % len(SERIES)]
                for solid, face in ((True, colour), (False, "none")):
                    x, y = ([getattr(p, axis) for p in points if p.solid is solid] for axis in "xy")
                    style = {"edgecolors": colour, "facecolors": face, "alpha": 0.7}
                    ax.scatter(x, y, s=14, linewidths=0.8, **style)
            ax.set(title=panel, xlabel=cloud.x, ylabel=cloud.y)
            ax.grid(True, axis="both")
            ax.yaxis.set_major_formatter("{x:,g}")
            if cloud.equal:
                _equal(ax, [p for points in cloud.groups.values() for p in points])
            if cloud.limit is not None:
                line = ax.axvline(cloud.limit, color=INK, linestyle="--", linewidth=1)
                line.set_label(cloud.limit_name)
        _name_groups(axes[0], names, self.hollow, marker="o", linestyle="none", markersize=4)
        legend(canvas, axes[0])


def _equal(ax: Any, points: Sequence[Point]) -> None:
    """Make both axes logarithmic over one range, with the diagonal and 20% to either side."""
    values = [value for p in points for value in (p.x, p.y)]
    low, high = 0.8 * min(values, default=1.0), 1.25 * max(values, default=10.0)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    ax.plot([low, high], [low, high], color=INK, linewidth=1, label="prediction = measurement")
    band = [0.8 * low, 0.8 * high], [1.2 * low, 1.2 * high]
    style = {"color": INK, "alpha": 0.08, "linewidth": 0}
    ax.fill_between([low, high], *band, label="within 20%", **style)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter(lambda value, _: "")


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

    def paint(self, canvas: Any) -> None:
        from matplotlib import colormaps
        from matplotlib.cm import ScalarMappable

        lines = max((cell.text.count("\n") + 1 for cell in self.cells.values()), default=1)
        height = 1.3 + (0.55 + 0.13 * lines) * len(self.rows)
        canvas.set_size_inches(max(6, 1.5 + 0.95 * len(self.columns)), height)
        ax, shades = canvas.subplots(), colormaps["cividis"]
        for y, row in enumerate(self.rows):
            best = max((c.value for (r, _), c in self.cells.items() if r == row), default=1.0)
            for x, column in enumerate(self.columns):
                cell = self.cells.get((row, column))
                if cell is None:
                    ax.text(x, y, self.absent, ha="center", va="center", fontsize=7, alpha=0.6)
                else:
                    _cell(ax, x, y, cell, cell.value / best, shades)
        rows_of(ax, self.rows, self.x, lines=False)
        ax.set_xlim(-0.5, len(self.columns) - 0.5)
        ax.set_xticks(range(len(self.columns)), self.columns)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        bar = canvas.colorbar(ScalarMappable(cmap=shades), ax=ax, pad=0.01, shrink=0.9, aspect=12)
        bar.set_label(f"{self.unit},\nshare of the row's best", labelpad=8)
        bar.outline.set_visible(False)


def _cell(ax: Any, x: int, y: int, cell: Cell, share: float, shades: Any) -> None:
    color = shades(share)
    ax.fill_between([x - 0.48, x + 0.48], y - 0.47, y + 0.47, color=color, linewidth=0)
    text = {"ha": "center", "color": "#ffffff" if share < 0.55 else "#000000"}
    head = {"va": "bottom", "fontweight": "bold", "fontsize": 10}
    ax.text(x, y - 0.08, number(cell.value), **head, **text)
    ax.text(x, y - 0.02, cell.text, va="top", fontsize=6.5, linespacing=1.25, **text)


@dataclass(frozen=True, kw_only=True)
class Ratios(Figure):
    """A table whose last numbers are ratios with a threshold at 1; the picture shows the ratios."""

    sheet: Table
    ratios: Mapping[str, float]
    x: str

    open: ClassVar[bool] = True

    def table(self) -> Table:
        return self.sheet

    def paint(self, canvas: Any) -> None:
        values = list(self.ratios.values())
        canvas.set_size_inches(9, 1.3 + 0.34 * len(values))
        ax = canvas.subplots()
        low = 10 ** math.floor(math.log10(min([0.3, *(v for v in values if v > 0)])))
        high = 10 ** math.ceil(math.log10(max([3.0, *values])))
        ax.axvspan(1, 2 * high, color=WARM[0], alpha=0.12, linewidth=0)
        place = {"textcoords": "offset points", "va": "center", "fontsize": 8}
        for y, value in enumerate(values):
            colour, x = SERIES[1] if value > 1 else SERIES[0], max(value, low)
            ax.plot([low, x], [y, y], color=colour, linewidth=2)
            ax.plot(x, y, "o", color=colour)
            ax.annotate(number(value), (x, y), (7, 0), **place)
        ax.axvline(1, color=INK, linestyle="--", linewidth=1)
        ax.set(xscale="log", xlim=(low, 2 * high))
        rows_of(ax, list(self.ratios), self.x)
