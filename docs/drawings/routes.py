"""Figure of a router: tokens of several ranks on their way to the experts that they chose, and each expert's load."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ultrascale_jax.figures.figure import Figure
from ultrascale_jax.figures.palette import INK, SERIES, shade

GAP = 0.6
"""Space between two ranks, in rows."""
WAY = 4.5
"""Space between tokens and experts, in rows."""


@dataclass(frozen=True, kw_only=True)
class Routes(Figure):
    """Tokens on the left, experts on the right, a line for each choice in the colour of the token's rank."""

    choices: Sequence[Sequence[int]]
    """The experts of each token; ranks hold equal runs of tokens, in order."""
    experts: int
    """Number of experts; ranks hold equal runs of them, in order."""
    ranks: int
    capacity: int | None = None
    """Tokens for which an expert has room: those beyond are drawn pale."""

    @property
    def loads(self) -> list[int]:
        """Tokens that chose each expert."""
        counts = Counter(expert for chosen in self.choices for expert in chosen)
        return [counts[expert] for expert in range(self.experts)]

    def paint(self, canvas: Any) -> None:
        tokens, room = len(self.choices), self.capacity or max(self.loads)
        height = tokens + GAP * (self.ranks - 1)
        canvas.set_size_inches(8.4, 0.9 + 0.24 * height)
        ax = canvas.subplots()
        ax.set_axis_off()
        ax.grid(False)
        left = _places(tokens, self.ranks, height)
        right = _places(self.experts, self.ranks, height)
        scale = 3 / max(*self.loads, room)
        ax.set(xlim=(-1.7, WAY + 6.6), ylim=(height + 0.3, -1.1))
        seen: Counter[int] = Counter()
        for token, chosen in enumerate(self.choices):
            rank = token * self.ranks // tokens
            _box(ax, (-0.3, left[token] - 0.42), (0.7, 0.84), rank, str(token))
            for expert in chosen:
                seen[expert] += 1
                fits = seen[expert] <= room
                style = {"color": SERIES[rank % len(SERIES)], "alpha": 0.75 if fits else 0.22}
                ax.plot([0.45, WAY], [left[token], right[expert]], linewidth=1.3, **style)
        for expert, load in enumerate(self.loads):
            rank, y = expert * self.ranks // self.experts, right[expert]
            _box(ax, (WAY, y - 0.6), (1.5, 1.2), rank, f"expert {expert}")
            start = WAY + 1.7
            for first, last, step in ((0, min(load, room), 0), (room, load, 1)):
                if last > first:
                    edges = [start + first * scale, start + last * scale]
                    colour = shade(SERIES[rank % len(SERIES)], step, 2)
                    ax.fill_between(edges, y - 0.5, y + 0.5, color=colour, linewidth=0)
            ax.text(start + load * scale + 0.1, y, str(load), ha="left", va="center", fontsize=8)
        if self.capacity:
            at = WAY + 1.7 + room * scale
            ax.plot([at, at], [-0.3, height], color=INK, linestyle="--", linewidth=1)
            ax.text(at, -0.55, f"room for {room}", ha="center", va="bottom", fontsize=8)
        for rank in range(self.ranks):
            middle = _middle(left, rank, self.ranks)
            ax.text(-0.6, middle, f"rank {rank}", ha="right", va="center", fontsize=9)
            ends = {"ha": "left", "va": "center", "fontsize": 9}
            ax.text(WAY + 5.5, _middle(right, rank, self.ranks), f"rank {rank}", **ends)
        head = {"va": "bottom", "fontsize": 9, "fontweight": "bold"}
        ax.text(-0.3, -0.55, "tokens", **head)
        ax.text(WAY, -0.55, "experts", **head)


def _places(count: int, ranks: int, height: float) -> list[float]:
    """Return the middles of `count` rows over the whole height, with a gap between ranks."""
    row = (height - GAP * (ranks - 1)) / count
    return [(n + 0.5) * row + GAP * (n * ranks // count) for n in range(count)]


def _middle(places: Sequence[float], rank: int, ranks: int) -> float:
    part = len(places) // ranks
    of_rank = places[rank * part : (rank + 1) * part]
    return sum(of_rank) / len(of_rank)


def _box(
    ax: Any, corner: tuple[float, float], size: tuple[float, float], rank: int, text: str
) -> None:
    (x, y), (width, height) = corner, size
    colour = shade(SERIES[rank % len(SERIES)], 0, 2)
    ax.fill_between([x, x + width], y, y + height, color=colour, linewidth=0)
    style = {"ha": "center", "va": "center", "fontsize": 8, "color": "#000000"}
    ax.text(x + width / 2, y + height / 2, text, **style)
