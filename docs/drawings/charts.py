"""Charts of the pages: lines over powers of two, and a heat map."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ultrascale_jax.figures.charts import Point, name_groups
from ultrascale_jax.figures.figure import Figure, grid, legend, rows_of
from ultrascale_jax.figures.palette import INK, MARKERS, PAPER, SERIES
from ultrascale_jax.units import number


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
        name_groups(axes[0], names, hollow, markersize=5)
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
