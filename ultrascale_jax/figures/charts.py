"""Figures of sizes: stacked bars and areas, and clouds of points."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ultrascale_jax.figures.figure import Figure, grid, legend, resize
from ultrascale_jax.figures.palette import INK, MARKERS, PAPER, SERIES, colours, is_variable
from ultrascale_jax.units import number

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
    text: str = ""
    """Over the stack, in place of its height."""

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

    height = 4.2
    """Height of the picture in inches."""

    @property
    def peak(self) -> int:
        """The column with the highest stack."""
        totals = [sum(column) for column in zip(*self.parts.values(), strict=True)]
        return max(range(len(totals)), key=totals.__getitem__, default=0)

    def paint(self, canvas: Any) -> None:
        (ax,) = grid(canvas, 1, 3.6, 1)
        resize(canvas, 10.5, self.height)
        largest = {part: max(row) for part, row in self.parts.items()}
        least = INVISIBLE * max(largest.values(), default=0.0)
        look = colours([part for part, size in largest.items() if size > least])
        rows = [[*self.parts[part], self.parts[part][-1]] for part in look]
        colour, hatch = zip(*look.values(), strict=True) if look else ((), ())
        style = {"colors": colour, "hatch": hatch, "edgecolor": PAPER, "linewidth": 0}
        ax.stackplot([*self.starts, self.end], rows, labels=list(look), step="post", **style)
        top = highest = max((sum(column) for column in zip(*rows, strict=True)), default=0.0)
        if self.limit is not None:
            line = ax.axhline(self.limit, color=INK, linestyle="--", linewidth=1)
            line.set_label(self.limit_name)
            top = max(top, self.limit)
        box = {"boxstyle": "square,pad=0.1", "facecolor": PAPER, "edgecolor": "none"}
        place = self.starts[self.peak], highest
        style = {"ha": "center", "va": "top", "fontsize": 7, "bbox": box}
        ax.annotate(number(highest), place, (0, -4), textcoords="offset points", **style)
        ax.set(
            xlim=(self.starts[0], self.end), ylim=(0, 1.1 * top), xlabel=self.x, ylabel=self.unit
        )
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
    """False draws it hollow; the figure explains the meaning."""


def name_groups(ax: Any, names: Sequence[str], hollow: str, **style: Any) -> None:
    """Add entries of the legend: a marker for each name, and the meaning of a hollow point."""
    for rank, name in enumerate(names):
        look = {"marker": MARKERS[rank % len(MARKERS)], **style}
        ax.plot([], [], color=SERIES[rank % len(SERIES)], label=name, **look)
    if hollow:
        empty = {"color": INK, "markerfacecolor": PAPER, "linestyle": "none"}
        ax.plot([], [], marker="o", label=hollow, **empty)


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """Points in groups; `x` and `y` are the titles of the axes."""

    x: str
    y: str
    groups: Mapping[str, Sequence[Point]]
    limit: float | None = None
    """Place of a dashed vertical line."""
    limit_name: str = ""


@dataclass(frozen=True, kw_only=True)
class Clouds(Figure):
    """Scatter plots side by side."""

    panels: Mapping[str, Cloud]
    hollow: str = ""
    """Meaning of a hollow point."""

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
            if cloud.limit is not None:
                line = ax.axvline(cloud.limit, color=INK, linestyle="--", linewidth=1)
                line.set_label(cloud.limit_name)
        name_groups(axes[0], names, self.hollow, marker="o", linestyle="none", markersize=4)
        legend(canvas, axes[0])
