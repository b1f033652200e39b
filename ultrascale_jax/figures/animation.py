"""A pipeline's schedule as a GIF: its operations moment by moment, and beside them what every rank keeps by then."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ultrascale_jax.config import require
from ultrascale_jax.figures.figure import version
from ultrascale_jax.figures.palette import INK, OPERATIONS, PAPER, shade
from ultrascale_jax.figures.pipeline import Kept, Operation, Pipeline

MOST_FRAMES = 400
"""Moments that one animation shows: at three a second it would take over two minutes to see them."""
LAST = 3000
"""Milliseconds for which the last frame stays."""
IDLE = "#eeeeee"


@dataclass(frozen=True)
class _Layout:
    """Places of an animation, in pixels."""

    figure: Pipeline
    cell: int = 15
    """Width of a micro-batch that is kept."""
    row: int = 30
    left: int = 70
    top: int = 62
    gap: int = 26
    """Between the schedule and what is kept."""
    widest: int = 1040
    """Width of the longest schedule."""

    @cached_property
    def scale(self) -> float:
        """Pixels of a unit of time: an operation holds its number, as long as the schedule has the width for it."""
        figure = self.figure
        narrowest = min(op.end - op.start for op in figure.operations)
        digits = max(len(str(op.microbatch)) for op in figure.operations)
        return min((5 + 8 * digits) / narrowest, self.widest / figure.width)

    @cached_property
    def places(self) -> list[tuple[int, Kept]]:
        """Everything that is kept, with its place in its rank's row: the first that is free."""
        ends: dict[int, list[float]] = {}
        found = []
        for part in self.figure.kept:
            row = ends.setdefault(part.rank, [])
            free = (n for n, end in enumerate(row) if end <= part.start + self.edge)
            place = next(free, len(row))
            row[place:] = [part.end, *row[place + 1 :]]
            found.append((place, part))
        return found

    @property
    def edge(self) -> float:
        """Difference that tells two times apart."""
        return 1e-6 * self.figure.width

    @property
    def kept(self) -> int:
        """Left edge of what is kept."""
        return self.at(self.figure.width) + self.gap

    @property
    def size(self) -> tuple[int, int]:
        most = 1 + max(place for place, _ in self.places)
        return self.kept + max(
            most * self.cell, 130
        ) + 12, self.top + self.figure.ranks * self.row + 44

    def at(self, time: float) -> int:
        """Return the place of a time."""
        return self.left + round(time * self.scale)

    def line(self, rank: int) -> tuple[int, int]:
        """Return upper and lower edge of a rank's row."""
        return self.top + rank * self.row, self.top + (rank + 1) * self.row - 4


def animate(figure: Pipeline, gif: Path) -> None:
    """Write a GIF with a frame for each of `figure.moments`.

    Raises `UserError` without matplotlib, and for more moments than anyone would watch.
    """
    version()
    from PIL import Image

    count = len(figure.moments)
    fix = f"a GIF shows at most {MOST_FRAMES} moments, and this table has {count}; use fewer micro-batches, or .png"
    require(count <= MOST_FRAMES, "figure", str(gif), fix)
    layout, fonts = _Layout(figure), _fonts()
    frames = [_frame(layout, fonts, number) for number in range(count)]
    # One palette for all: else each frame would be stored whole.
    few = frames[-1].quantize(64, dither=Image.Dither.NONE)
    first, *rest = (frame.quantize(palette=few, dither=Image.Dither.NONE) for frame in frames)
    each = min(900, max(250, 20_000 // count))
    times = [each] * (count - 1) + [LAST]
    first.save(gif, save_all=True, append_images=rest, duration=times, loop=0, optimize=True)


def _fonts() -> dict[str, Any]:
    """Return the fonts of the other figures, for numbers, text and the title."""
    import matplotlib
    from PIL import ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    plain, bold = (str(folder / f"DejaVuSans{name}.ttf") for name in ("", "-Bold"))
    return {
        "number": ImageFont.truetype(plain, 12),
        "text": ImageFont.truetype(plain, 15),
        "title": ImageFont.truetype(bold, 17),
    }


def _frame(layout: _Layout, fonts: dict[str, Any], number: int) -> Any:
    """Draw what has run until the end of a moment, and what is kept then."""
    from PIL import Image, ImageDraw

    figure, moment = layout.figure, layout.figure.moments[number]
    before = figure.moments[number - 1] if number else 0.0
    image = Image.new("RGB", layout.size, PAPER)
    draw = ImageDraw.Draw(image)
    draw.text((10, 8), figure.title, INK, fonts["title"])
    said = f"{figure.unit}: {moment:g} of {figure.width:g}"
    draw.text((layout.left, 36), said, INK, fonts["text"])
    draw.text((layout.kept, 36), "kept in memory", INK, fonts["text"])
    for rank in range(figure.ranks):
        up, down = layout.line(rank)
        middle = (up + down) / 2
        draw.text((layout.left - 8, middle), f"rank {rank}", INK, fonts["text"], anchor="rm")
        draw.rectangle((layout.left, up, layout.at(moment) - 1, down), IDLE)
    for place, part in layout.places:
        if part.start < moment - layout.edge and part.end > before + layout.edge:
            up, down = layout.line(part.rank)
            left = layout.kept + place * layout.cell
            kind = "W" if part.queued <= before + layout.edge else "F"
            _box(draw, (left, up, left + layout.cell, down), kind, part, layout, fonts)
    for op in figure.operations:
        if op.start < moment - layout.edge:
            up, down = layout.line(op.rank)
            box = layout.at(op.start), up, layout.at(op.end), down
            _box(draw, box, op.kind, op, layout, fonts, now=op.end > before + layout.edge)
    _keys(draw, layout, fonts)
    return image


def _box(
    draw: Any,
    box: tuple[int, int, int, int],
    kind: str,
    part: Operation | Kept,
    layout: _Layout,
    fonts: dict[str, Any],
    *,
    now: bool = False,
) -> None:
    """Draw an operation, or what is kept for one, with its micro-batch; one that runs now has a border."""
    left, up, right, down = box
    colour = shade(OPERATIONS[kind], part.chunk, layout.figure.chunks)
    draw.rectangle((left, up, right - 2, down), colour, INK if now else None)
    if right - left >= 3 + 8 * len(str(part.microbatch)):
        place = ((left + right - 2) / 2, (up + down) / 2)
        draw.text(place, str(part.microbatch), "#000000", fonts["number"], anchor="mm")


def _keys(draw: Any, layout: _Layout, fonts: dict[str, Any]) -> None:
    """Draw the legend below the rows."""
    figure = layout.figure
    y, x = layout.size[1] - 30, layout.left
    keys = [
        (words if chunk == 0 else f"chunk {chunk}", shade(OPERATIONS[kind], chunk, figure.chunks))
        for kind, words in figure.kinds.items()
        for chunk in range(figure.chunks)
    ]
    for name, colour in (*keys, ("idle", IDLE)):
        draw.rectangle((x, y, x + 14, y + 14), colour)
        draw.text((x + 20, y + 7), name, INK, fonts["text"], anchor="lm")
        x += 34 + round(draw.textlength(name, fonts["text"]))
