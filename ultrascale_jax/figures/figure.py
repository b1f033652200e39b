"""The base of all figures: numbers that matplotlib draws into a PNG file."""

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale_jax.config import UserError
from ultrascale_jax.figures.palette import STYLE


@dataclass(frozen=True, kw_only=True)
class Figure(ABC):
    """A picture; a subclass chooses its kind."""

    name: str
    title: str
    caption: str
    """Content and assumptions of the figure, which the file keeps as its description."""

    @abstractmethod
    def paint(self, canvas: Any) -> None:
        """Draw on `canvas`, a figure of matplotlib."""

    def draw(self, png: Path) -> None:
        """Write a PNG file of 150 dots an inch and 256 colours; `UserError` without matplotlib."""
        version()
        import matplotlib
        from matplotlib.figure import Figure as Canvas
        from PIL import Image, PngImagePlugin  # which matplotlib needs

        with matplotlib.rc_context(STYLE):
            canvas = Canvas(layout="constrained")
            self.paint(canvas)
            canvas.suptitle(self.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
            pixels = io.BytesIO()
            canvas.savefig(pixels, dpi=150)
        few = Image.open(pixels).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        texts = PngImagePlugin.PngInfo()
        texts.add_itxt("Description", self.caption)
        few.save(png, optimize=True, dpi=(150, 150), pnginfo=texts)


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
    """Create `count` axes in rows of `columns`; `share` is sharey of matplotlib, `widths` are relative (one row)."""
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
    """Draw a row for each name from the top down; `lines` along the ticks of the x axis."""
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
    lines = [n for n in range(len(labels)) if n not in order]
    picked = [*(order[::-1] if reverse else order), *lines]
    canvas.legend(
        [handles[n] for n in picked], [labels[n] for n in picked], loc="outside right upper"
    )
