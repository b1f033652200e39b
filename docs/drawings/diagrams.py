"""Figures that explain: what collectives exchange between GPUs, and boxes with arrows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ultrascale_jax.figures.figure import Figure
from ultrascale_jax.figures.palette import INK, SERIES, shade

COLUMN_INCHES, ROW_INCHES = 2.5, 0.78
"""Width and height of a place of a flow."""
BOX = 0.84, 0.7
"""Width and height of a box, in its place."""


type Rows = Sequence[Sequence[int]]
"""The numbers that each GPU holds."""


def givers(value: int) -> list[int]:
    """Return the GPUs that gave a number: GPU g gives digits at the g-th decimal place, so a sum names all of them."""
    return [place for place, digit in enumerate(reversed(str(value))) if digit != "0"]


@dataclass(frozen=True, kw_only=True)
class Exchange(Figure):
    """Numbers that GPUs hold before and after collectives; stripes in a number say which GPUs gave it."""

    panels: Mapping[str, tuple[Rows, Rows]]
    """Rows before and after, by the title of the panel; 0 is an empty place."""
    columns: int = 2

    def paint(self, canvas: Any) -> None:
        rows = -(-len(self.panels) // self.columns)
        height = max(len(left) for left, _ in self.panels.values())
        canvas.set_size_inches(4.4 * self.columns, 0.5 + rows * (0.3 + 0.36 * height))
        axes = canvas.subplots(rows, self.columns, squeeze=False).ravel()
        for spare in axes[len(self.panels) :]:
            spare.remove()
        width = max(len(row) for sides in self.panels.values() for side in sides for row in side)
        for ax, (title, (left, right)) in zip(axes, self.panels.items(), strict=False):
            ax.set(xlim=(-1.2, 2 * width + 1.3), ylim=(height, 0))
            ax.set_axis_off()
            ax.set_title(title, loc="left", fontweight="bold", x=0.02)
            for gpu, sides in enumerate(zip(left, right, strict=True)):
                ax.text(-0.15, gpu + 0.5, f"GPU {gpu}", ha="right", va="center", fontsize=8)
                for start, row in zip((0, width + 1.2), sides, strict=True):
                    for place, value in enumerate(row):
                        _number(ax, start + place, gpu, value)
            tip, tail = (width + 1.05, height / 2), (width + 0.15, height / 2)
            arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.2}
            ax.annotate("", tip, tail, arrowprops=arrow)


def _number(ax: Any, x: float, y: float, value: int) -> None:
    """Draw a number in its place, with a stripe in the colour of each GPU that gave it."""
    gpus = givers(value) if value else []
    for n, gpu in enumerate(reversed(gpus)):  # the highest decimal place is on the left
        left, right = x + 0.04 + 0.92 * n / len(gpus), x + 0.04 + 0.92 * (n + 1) / len(gpus)
        colour = shade(SERIES[gpu % len(SERIES)], 1, 3)
        ax.fill_between([left, right], y + 0.06, y + 0.94, color=colour, linewidth=0)
    edge = [x + 0.04, x + 0.96, x + 0.96, x + 0.04, x + 0.04]
    ax.plot(edge, [y + 0.06, y + 0.06, y + 0.94, y + 0.94, y + 0.06], color=INK, linewidth=0.4)
    if value:
        ax.text(x + 0.5, y + 0.5, str(value), ha="center", va="center", fontsize=8)


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box of a flow, in a column and a row."""

    column: int
    row: float
    name: str
    text: str = ""
    """Small lines below the name."""


@dataclass(frozen=True, kw_only=True)
class Flow(Figure):
    """Boxes in columns, and arrows between them."""

    columns: Sequence[str]
    """Titles."""
    boxes: Sequence[Box]
    arrows: Sequence[tuple[str, str]]
    """Names of two boxes."""

    def paint(self, canvas: Any) -> None:
        rows = max(box.row for box in self.boxes) + 1
        width, height = len(self.columns), rows + 0.5
        canvas.set_size_inches(COLUMN_INCHES * width, ROW_INCHES * height + 0.3)
        ax = canvas.subplots()
        ax.set(xlim=(0, width), ylim=(rows, -0.5))
        ax.set_axis_off()
        for column, title in enumerate(self.columns):
            colour = shade(SERIES[column % len(SERIES)], 2, 3)
            ax.fill_between(
                [column + 0.02, column + 0.98], -0.5, rows, color=colour, alpha=0.35, linewidth=0
            )
            ax.text(column + 0.5, -0.27, title, ha="center", va="center", fontweight="bold")
        middle = {box.name: (box.column + 0.5, box.row + 0.5) for box in self.boxes}
        for start, end in self.arrows:
            _arrow(ax, middle[start], middle[end])
        for box in self.boxes:
            _box(ax, box)


def _box(ax: Any, box: Box) -> None:
    x, y = box.column + 0.5, box.row + 0.5
    colour = shade(SERIES[box.column % len(SERIES)], 1, 3)
    across, down = (size / 2 for size in BOX)
    ax.fill_between([x - across, x + across], y - down, y + down, color=colour, linewidth=0)
    lift = 0.03 + 0.085 * (box.text.count("\n") + 1) if box.text else 0.0
    ax.text(x, y - lift, box.name, ha="center", va="center", fontsize=8.5, fontweight="bold")
    ax.text(x, y + 0.12 - lift / 4, box.text, ha="center", va="center", fontsize=7, linespacing=1.2)


def _arrow(ax: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw an arrow from edge to edge of two boxes: down or up a column, else from side to side."""
    across, down = (size / 2 for size in BOX)
    (x, y), (to_x, to_y) = start, end
    if x == to_x:
        sign = 1 if to_y > y else -1
        tail, tip = (x, y + sign * down), (to_x, to_y - sign * down)
    else:
        sign = 1 if to_x > x else -1
        tail, tip = (x + sign * across, y), (to_x - sign * across, to_y)
    style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", tip, tail, arrowprops=style)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A block of a matrix, and the devices that hold it."""

    rows: slice
    columns: slice
    devices: Sequence[int]


def _pieces(array: jax.Array) -> list[Piece]:
    """Return the shards of a matrix, each with the devices that hold it."""
    holders: dict[tuple, list[int]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        bounds = tuple(
            part.indices(size)[:2] for part, size in zip(index, array.shape, strict=True)
        )
        holders.setdefault(bounds, []).append(device.id)
    return [
        Piece(rows=slice(*r), columns=slice(*c), devices=ids) for (r, c), ids in holders.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Pieces(Figure):
    """Matrices, cut into the shards that devices hold."""

    panels: Mapping[str, Sequence[Piece]]
    """Shards of a matrix by its title."""

    @classmethod
    def of(cls, title: str, **matrices: jax.Array) -> "Pieces":
        """Draw the figure of arrays by name, with their types."""
        panels = {
            f"{name}: {jax.typeof(array)}": _pieces(array) for name, array in matrices.items()
        }
        return cls(name="pieces", title=title, caption="", panels=panels)

    def paint(self, canvas: Any) -> None:
        sizes = [
            (max(p.rows.stop for p in pieces), max(p.columns.stop for p in pieces))
            for pieces in self.panels.values()
        ]
        tallest = max(height for height, _ in sizes)
        canvas.set_size_inches(9, 3.1)
        widths = [width for _, width in sizes]
        shares = [width + 2 for width in widths]
        (axes,) = canvas.subplots(1, len(sizes), squeeze=False, width_ratios=shares)
        for ax, (title, pieces), width in zip(axes, self.panels.items(), widths, strict=True):
            ax.set(xlim=(-0.2, width + 0.2), ylim=(tallest + 0.2, -0.2))
            ax.set_axis_off()
            ax.set_title(title, loc="left", fontsize=9, fontfamily="monospace")
            for p in pieces:
                left, right = p.columns.start + 0.06, p.columns.stop - 0.06
                top, bottom = p.rows.start + 0.06, p.rows.stop - 0.06
                colour = shade(SERIES[p.devices[0] % len(SERIES)], p.devices[0] // len(SERIES), 4)
                ax.fill_between([left, right], top, bottom, color=colour, linewidth=0)
                middle = (left + right) / 2, (top + bottom) / 2
                ax.text(*middle, _names(p.devices), ha="center", va="center", fontsize=8)


def _names(devices: Sequence[int]) -> str:
    """Return the numbers of devices, `all` for many."""
    return " ".join(map(str, devices)) if len(devices) < 5 else f"all {len(devices)}"
