"""Draws the figures with matplotlib, without a display; one drawing gives the PNG and the page's SVG."""

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ultrascale_jax.config import UserError
from ultrascale_jax.plan.report.canvas import grid, legend
from ultrascale_jax.plan.report.draw_rows import streams, ticks
from ultrascale_jax.plan.report.figures import (
    Bar,
    Bars,
    Clouds,
    Figure,
    Heat,
    Lines,
    Pipeline,
    Sheet,
    Streams,
    number,
)
from ultrascale_jax.plan.report.palette import (
    INK,
    MARKERS,
    PAPER,
    SERIES,
    STYLE,
    WARM,
    colours,
)

CLIP = 2.5
"""A stack higher than so many times the limit is cut, and its height written on it."""

INVISIBLE = 0.002
"""A part that is smaller than this share of the axis in all stacks is left to the table."""


def version() -> str:
    """Of matplotlib.

    Raises:
      UserError: it is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UserError("matplotlib is missing: pip install 'ultrascale_jax[report]'") from None
    return matplotlib.__version__


def draw(figure: Figure, png: Path) -> str:
    """Writes `figure` as a PNG file of 150 dots an inch; the same picture as an SVG file.

    Raises:
      UserError: matplotlib is not installed.
    """
    version()
    import matplotlib
    from matplotlib.figure import Figure as Canvas
    from PIL import Image  # which matplotlib needs

    with matplotlib.rc_context(STYLE | {"svg.hashsalt": figure.name}):
        canvas = Canvas(layout="constrained")
        PAINTERS[type(figure)](canvas, figure)
        title = canvas.suptitle(figure.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        pixels = io.BytesIO()
        canvas.savefig(pixels, dpi=150, metadata={"Software": None})
        few = Image.open(pixels).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        few.save(png, optimize=True, dpi=(150, 150))
        title.set(visible=False, in_layout=False)  # the page has its own
        text = io.StringIO()
        canvas.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    return text.getvalue()


def _bars(canvas: Any, figure: Bars) -> None:
    panels = figure.panels
    columns = 4 if max(len(bars) for bars in panels.values()) <= 7 else 2
    widths = [max(2, len(bars)) for bars in panels.values()]
    axes = grid(canvas, len(panels), 3.3, columns, widths=widths)
    highest = max(bar.total for bars in panels.values() for bar in bars)
    top = 1.12 * (min(highest, CLIP * figure.limit) if figure.limit else highest)
    top = max(top, 1.08 * (figure.limit or 0)) or 1.0
    look = colours([p for p in figure.parts if figure.largest(p) > INVISIBLE * top])
    for n, (ax, (panel, bars)) in enumerate(zip(axes, panels.items(), strict=True)):
        floor = [0.0] * len(bars)
        for part, (colour, hatch) in look.items():
            heights = [bar.parts.get(part, 0.0) for bar in bars]
            style = {"color": colour, "hatch": hatch, "edgecolor": PAPER, "linewidth": 0.4}
            ax.bar(range(len(bars)), heights, 0.72, floor, label=part, **style)
            floor = [a + b for a, b in zip(floor, heights, strict=True)]
        for x, bar in enumerate(bars):
            _height(ax, x, bar, top)
        side = 0.6 + max(0, 3 - len(bars)) / 3
        ax.set(ylim=(0, top), xlim=(-side, len(bars) - 1 + side), title=panel, xlabel=figure.x)
        labels, turn = [bar.label for bar in bars], {}
        if _crowded(bars, min(columns, len(panels))):
            labels = [label.replace("\n", " ") for label in labels]
            turn = {"rotation": 25, "ha": "right"}
        ax.set_xticks(range(len(bars)), labels, **turn)
        ax.tick_params(axis="x", length=0)
        if figure.limit is not None:
            line = ax.axhline(figure.limit, color=INK, linestyle="--", linewidth=1)
            line.set_label(figure.limit_name)
        ax.yaxis.set_major_formatter("{x:,g}")
        if n % columns == 0:
            ax.set_ylabel(figure.unit)
    legend(canvas, axes[0], reverse=len(look))


def _crowded(bars: Sequence[Bar], columns: int) -> bool:
    widths = [max(map(len, bar.label.splitlines()), default=0) for bar in bars]
    return sum(width + 2 for width in widths) > 150 / columns


def _height(ax: Any, x: int, bar: Bar, top: float) -> None:
    """The total over a stack, or inside it where it is cut."""
    cut = bar.total > top * 0.985
    text, y = number(bar.total), min(bar.total, top)
    box = {"boxstyle": "square,pad=0.1", "facecolor": PAPER, "edgecolor": "none"}
    style = {"ha": "center", "fontsize": 7, "bbox": box}
    if cut:
        ax.text(x, 0.985 * y, f"↑{text}", va="top", **style)
    else:
        ax.text(x, y + 0.012 * top, text, va="bottom", **style)


def _powers(ax: Any, values: Sequence[float]) -> None:
    """A logarithmic x axis with a tick at every value."""
    ax.set_xscale("log", base=2)
    ticks = sorted(set(values))
    ax.set_xticks(ticks, [number(tick) for tick in ticks])
    ax.set_xticks([], minor=True)


def _lines(canvas: Any, figure: Lines) -> None:
    panels = figure.panels
    columns = 2 if len(panels) == 4 else 3
    axes = grid(canvas, len(panels), 3.2, columns, figure.scale)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    tops: dict[int, float] = {}
    for n, (ax, (panel, lines)) in enumerate(zip(axes, panels.items(), strict=True)):
        for name, points in lines.items():
            rank = names.index(name)
            colour, marker = SERIES[rank % len(SERIES)], MARKERS[rank % len(MARKERS)]
            x, y = [p.x for p in points], [p.y for p in points]
            ax.plot(x, y, color=colour, linewidth=1.5)
            for p in points:
                face = colour if p.solid else PAPER
                ax.plot(p.x, p.y, marker, color=colour, markerfacecolor=face, markersize=5)
        if lines:
            _powers(ax, [p.x for points in lines.values() for p in points])
        ax.set(title=panel, xlabel=figure.x)
        if n % columns == 0:
            ax.set_ylabel(figure.y)
        ax.yaxis.set_major_formatter("{x:,g}")
        group = {"all": 0, "row": n // columns, "none": n}[figure.scale]
        top = max((p.y for points in lines.values() for p in points), default=1.0)
        tops[group] = max(tops.get(group, 0.0), 1.07 * top)
        ax.set_ylim(0, tops[group])
    for rank, name in enumerate(names):
        colour, marker = SERIES[rank % len(SERIES)], MARKERS[rank % len(MARKERS)]
        axes[0].plot([], [], color=colour, marker=marker, markersize=5, label=name)
    points = [p for lines in panels.values() for points in lines.values() for p in points]
    _hollow(axes[0], "" if all(p.solid for p in points) else figure.hollow)
    legend(canvas, axes[0])


def _hollow(ax: Any, meaning: str) -> None:
    """Says in the legend what a hollow point means."""
    if meaning:
        style = {"color": INK, "markerfacecolor": PAPER, "linestyle": "none"}
        ax.plot([], [], marker="o", label=meaning, **style)


def _clouds(canvas: Any, figure: Clouds) -> None:
    panels = figure.panels
    axes = grid(canvas, len(panels), 4.0, 3, share=False)
    names = list(dict.fromkeys(name for cloud in panels.values() for name in cloud.groups))
    for ax, (panel, cloud) in zip(axes, panels.items(), strict=True):
        for name, points in cloud.groups.items():
            rank = names.index(name)
            colour = SERIES[rank % len(SERIES)]
            for solid, face in ((True, colour), (False, "none")):
                x, y = ([getattr(p, axis) for p in points if p.solid is solid] for axis in "xy")
                ax.scatter(
                    x, y, s=14, linewidths=0.8, edgecolors=colour, facecolors=face, alpha=0.7
                )
        ax.set(title=panel, xlabel=cloud.x, ylabel=cloud.y)
        ax.grid(True, axis="both")
        ax.yaxis.set_major_formatter("{x:,g}")
        if cloud.equal:
            _equal(ax, [v for points in cloud.groups.values() for p in points for v in (p.x, p.y)])
        if cloud.limit is not None:
            ax.axvline(cloud.limit, color=INK, linestyle="--", linewidth=1, label=cloud.limit_name)
    for rank, name in enumerate(names):
        axes[0].plot([], [], "o", color=SERIES[rank % len(SERIES)], markersize=4, label=name)
    _hollow(axes[0], figure.hollow)
    legend(canvas, axes[0])


def _equal(ax: Any, values: Sequence[float]) -> None:
    """Logarithmic axes of one range, with the diagonal and 20% to either side."""
    low, high = 0.8 * min(values, default=1.0), 1.25 * max(values, default=10.0)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    ax.plot([low, high], [low, high], color=INK, linewidth=1, label="prediction = measurement")
    span = [low, high]
    ax.fill_between(
        span, [0.8 * v for v in span], [1.2 * v for v in span], color=INK, alpha=0.08, linewidth=0,
        label="within 20%",
    )  # fmt: skip
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter(lambda value, _: "")


def _heat(canvas: Any, figure: Heat) -> None:
    from matplotlib import colormaps

    lines = max((cell.text.count("\n") + 1 for cell in figure.cells.values()), default=1)
    canvas.set_size_inches(
        max(7, 1.2 + 1.35 * len(figure.columns)), 1.3 + (0.55 + 0.16 * lines) * len(figure.rows)
    )
    ax = canvas.subplots()
    shades = colormaps["cividis"]
    for y, row in enumerate(figure.rows):
        best = max((c.value for (r, _), c in figure.cells.items() if r == row), default=1.0)
        for x, column in enumerate(figure.columns):
            cell = figure.cells.get((row, column))
            if cell is None:
                ax.text(x, y, figure.absent, ha="center", va="center", fontsize=7, alpha=0.6)
                continue
            share = cell.value / best
            ax.fill_between(
                [x - 0.48, x + 0.48], y - 0.47, y + 0.47, color=shades(share), linewidth=0
            )
            ink = "#ffffff" if share < 0.55 else "#000000"
            text = {"ha": "center", "color": ink}
            ax.text(
                x, y - 0.08, number(cell.value), va="bottom", fontweight="bold", fontsize=10, **text
            )
            ax.text(x, y - 0.02, cell.text, va="top", fontsize=6.5, linespacing=1.25, **text)
    ax.set(xlim=(-0.5, len(figure.columns) - 0.5), ylim=(len(figure.rows) - 0.5, -0.5))
    ax.set_xticks(range(len(figure.columns)), figure.columns)
    ax.set_yticks(range(len(figure.rows)), figure.rows)
    ax.set(xlabel=figure.x)
    ax.grid(False)
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    from matplotlib.cm import ScalarMappable

    bar = canvas.colorbar(ScalarMappable(cmap=shades), ax=ax, pad=0.01, shrink=0.9, aspect=12)
    bar.set_label(f"{figure.unit},\nshare of the row's best", labelpad=8)
    bar.outline.set_visible(False)


def _sheet(canvas: Any, figure: Sheet) -> None:
    names, values = list(figure.ratios), list(figure.ratios.values())
    canvas.set_size_inches(9, 1.3 + 0.34 * len(names))
    ax = canvas.subplots()
    low = 10 ** math.floor(math.log10(min([0.3, *(v for v in values if v > 0)])))
    high = 10 ** math.ceil(math.log10(max([3.0, *values])))
    ax.axvspan(1, 2 * high, color=WARM[0], alpha=0.12, linewidth=0)
    for y, value in enumerate(values):
        colour = SERIES[1] if value > 1 else SERIES[0]
        ax.plot([low, max(value, low)], [y, y], color=colour, linewidth=2)
        ax.plot(max(value, low), y, "o", color=colour)
        ax.annotate(
            number(value),
            (max(value, low), y),
            (7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    ax.axvline(1, color=INK, linestyle="--", linewidth=1)
    ax.set(xscale="log", xlim=(low, high * 2), ylim=(len(names) - 0.5, -0.5), xlabel=figure.x)
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", length=0)
    ax.grid(True, axis="x")
    ax.grid(False, axis="y")


PAINTERS: dict[type[Figure], Callable[[Any, Any], None]] = {
    Bars: _bars,
    Lines: _lines,
    Clouds: _clouds,
    Heat: _heat,
    Streams: streams,
    Pipeline: ticks,
    Sheet: _sheet,
}
