"""The base of all figures: a name, its numbers as a table, and a drawing, which gives the PNG and the page's SVG."""

import io
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ultrascale_jax.config import UserError
from ultrascale_jax.figures.palette import INK, PAPER, STYLE


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
    """Content and assumptions of the figure; also its text for readers who cannot see it."""

    open: ClassVar[bool] = False
    """Whether the page shows the numbers at once."""

    @abstractmethod
    def table(self) -> Table:
        """Return the numbers of the picture."""

    @abstractmethod
    def paint(self, canvas: Any) -> None:
        """Draw on `canvas`, a figure of matplotlib."""

    def draw(self, png: Path) -> str:
        """Write a PNG file of 150 dots an inch and return the picture as SVG; `UserError` without matplotlib."""
        version()
        import matplotlib
        from matplotlib.figure import Figure as Canvas
        from PIL import Image  # which matplotlib needs

        with matplotlib.rc_context(STYLE | {"svg.hashsalt": self.name}):
            canvas = Canvas(layout="constrained")
            self.paint(canvas)
            title = canvas.suptitle(self.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
            pixels = io.BytesIO()
            canvas.savefig(pixels, dpi=150, metadata={"Software": None})
            few = Image.open(pixels).convert("RGB").quantize(256, dither=Image.Dither.NONE)
            few.save(png, optimize=True, dpi=(150, 150))
            title.set(visible=False, in_layout=False)  # the page has its own
            text = io.StringIO()
            canvas.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
        return text.getvalue()

    def picture(self, svg: str, label: str) -> str:
        """Turn what `draw` returned into an element of a page: own ids, the page's colours, nothing to load."""
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)
        svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
        svg = re.sub(r'\bid="([^"]+)"', rf'id="{self.name}-\1"', svg)
        svg = re.sub(r'(url\(#|href="#)', rf"\1{self.name}-", svg)
        width = re.search(r' width="([\d.]+)pt"', svg)
        assert width is not None
        limit = f' style="max-width: {1.5 * float(width[1]):.0f}px"'
        svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
        svg = svg.replace(INK, "currentColor").replace(PAPER, "var(--paper)").strip()
        return svg.replace("<svg", f'<svg role="img" aria-label="{label}"{limit}', 1)


def version() -> str:
    """Return matplotlib's version; `UserError` if it is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UserError("matplotlib is missing: pip install 'ultrascale_jax[report]'") from None
    return matplotlib.__version__


def grid(
    canvas: Any, count: int, height: float, columns: int, share: Any = True, widths: Any = None
) -> list[Any]:
    """Make `count` axes in rows of `columns`; `share` as matplotlib's sharey, `widths` relative, of a single row."""
    columns = min(columns, count)
    rows = -(-count // columns)
    resize(canvas, 10.5 if count > 1 else 8, 0.6 + height * rows)
    axes = canvas.subplots(
        rows, columns, sharey=share, squeeze=False, width_ratios=widths if rows == 1 else None
    ).ravel()
    for spare in axes[count:]:
        spare.remove()
    return list(axes[:count])


def resize(canvas: Any, width: float, height: float) -> None:
    """Give `canvas` so many inches, unless it is a part of a larger one."""
    if canvas is canvas.get_figure(root=True):
        canvas.set_size_inches(width, height)


def rows_of(ax: Any, names: Sequence[str], xlabel: str, *, lines: bool = True) -> None:
    """Make a row for each name from the top down; `lines` along the x axis' ticks."""
    ax.set(ylim=(len(names) - 0.5, -0.5), xlabel=xlabel)
    ax.set_yticks(range(len(names)), names)
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.tick_params(axis="y", length=0)
    ax.grid(lines, axis="x")
    ax.grid(False, axis="y")


def legend(canvas: Any, ax: Any, *, reverse: int = 0) -> None:
    """Draw the legend right of all panels; the first `reverse` entries from the top of the stack down."""
    handles, labels = ax.get_legend_handles_labels()
    order = [n for n, label in enumerate(labels) if hasattr(handles[n], "patches")]
    rest = [n for n in range(len(labels)) if n not in order]
    picked = [*(order[::-1] if reverse else order), *rest]
    canvas.legend(
        [handles[n] for n in picked], [labels[n] for n in picked], loc="outside right upper"
    )


def check_numbers(*values: Any) -> None:
    """Raise `ValueError` for a value that no axis can show: no number, or negative, infinite or nan."""
    for value in values:
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{value!r} is no size")


def number(value: Any) -> str:
    """Format a number: three significant digits, thousands apart."""
    if isinstance(value, str):
        return value
    if value is None or value != value:
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return f"{value:.{digits}f}" if size >= 0.01 else f"{value:.2g}"
