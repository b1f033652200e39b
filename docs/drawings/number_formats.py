"""Formats of floating-point numbers: their bits, and the numbers that they can hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ultrascale_jax.figures.figure import Figure, rows_of
from ultrascale_jax.figures.palette import INK, PAPER, SERIES

FIELDS = {"sign": SERIES[6], "exponent": SERIES[0], "mantissa": SERIES[1]}
"""Parts of a number, and their colours."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """One format; the numbers are positive."""

    name: str
    exponent: int
    """Bits."""
    mantissa: int
    """Bits, without the leading one."""
    least: float
    """The smallest number."""
    normal: float
    """The smallest number with all digits of the mantissa."""
    most: float
    """The largest finite number."""


@dataclass(frozen=True, kw_only=True)
class NumberFormats(Figure):
    """A row for each format: bits on the left, the range of magnitudes on the right."""

    formats: Sequence[Format]

    def paint(self, canvas: Any) -> None:
        canvas.set_size_inches(9.5, 1.4 + 0.5 * len(self.formats))
        left, right = canvas.subplots(1, 2, width_ratios=[1.15, 1])
        for y, f in enumerate(self.formats):
            colours = ["sign", *["exponent"] * f.exponent, *["mantissa"] * f.mantissa]
            for x, field in enumerate(colours):
                style = {"facecolor": FIELDS[field], "edgecolor": PAPER, "linewidth": 1}
                left.broken_barh([(x, 1)], (y - 0.32, 0.64), **style)
            text = {"va": "center", "fontsize": 8}
            left.text(len(colours) + 0.5, y, f"1 + {f.exponent} + {f.mantissa}", **text)
            style = {"height": 0.5, "color": FIELDS["exponent"]}
            right.barh(y, f.normal - f.least, left=f.least, alpha=0.35, **style)
            right.barh(y, f.most - f.normal, left=f.normal, **style)
        for field, colour in FIELDS.items():
            left.scatter([], [], marker="s", s=45, color=colour, label=field)
        names = [f.name for f in self.formats]
        rows_of(left, names, "bits", lines=False)
        rows_of(right, names, "magnitude (pale: with fewer digits)")
        left.set_xlim(0, 40)
        left.set_xticks([0, 8, 16, 32])
        least, most = min(f.least for f in self.formats), max(f.most for f in self.formats)
        right.set(xscale="log", xlim=(least / 100, 100 * most))
        right.axvline(1, color=INK, linewidth=0.8, linestyle=":")
        right.set_yticklabels([])
        canvas.legend(*left.get_legend_handles_labels(), loc="outside upper right", ncols=3)
