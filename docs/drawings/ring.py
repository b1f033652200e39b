"""Figures of attention over a ring of ranks: the blocks sent at each step, and which rank computes which block when."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ultrascale_jax.figures.figure import Figure
from ultrascale_jax.figures.palette import INK, SERIES, shade

HALF_NODE = 0.27
"""Half the side of a rank; the ring has radius 1."""


@dataclass(frozen=True, kw_only=True)
class Ring(Figure):
    """Rings of ranks, a panel for each step: whose keys each rank has, and how much of its block it needs."""

    pieces: Mapping[str, Sequence[str]]
    """By row of panels: names of the block that each rank holds."""
    needed: Mapping[str, Sequence[Sequence[float]]]
    """By row of panels: `[step][rank]`, share of the pairs of query and key that the mask lets through."""

    def owner(self, name: str, step: int, rank: int) -> str:
        """Return the block whose keys `rank` has in `step`."""
        pieces = self.pieces[name]
        return pieces[(rank - step) % len(pieces)]

    def paint(self, canvas: Any) -> None:
        steps = max(map(len, self.needed.values()))
        canvas.set_size_inches(2.15 * steps, 0.4 + 2.25 * len(self.needed))
        axes = canvas.subplots(len(self.needed), steps, squeeze=False)
        for row, (name, shares) in zip(axes, self.needed.items(), strict=True):
            for step, ax in enumerate(row):
                ax.set_axis_off()
                if step < len(shares):
                    ax.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect="equal")
                    ax.set_title(f"{name}, step {step}", fontsize=9)
                    self._ring(ax, name, step)

    def _ring(self, ax: Any, name: str, step: int) -> None:
        """Paint the ranks clockwise, in a box above the queries and below the keys, and the keys that each sends on."""
        pieces, shares = self.pieces[name], self.needed[name]
        ranks = len(pieces)
        places = [
            (math.sin(turn), math.cos(turn))
            for turn in (2 * math.pi * (rank + 0.5) / ranks for rank in range(ranks))
        ]
        for rank, place in enumerate(places):
            owner = (rank - step) % ranks
            _node(ax, place, rank, owner, pieces, shares[step][rank])
            if step + 1 < len(shares):
                _send(ax, place, places[(rank + 1) % ranks], SERIES[owner % len(SERIES)])


def _node(
    ax: Any, place: tuple[float, float], rank: int, owner: int, pieces: Sequence[str], share: float
) -> None:
    """Paint a rank: its queries above, the keys that it has below, faint as far as it needs none; and the share."""
    x, y = place
    side, height = HALF_NODE * 1.25, HALF_NODE
    text = {"ha": "center", "va": "center", "fontsize": 7.5, "color": "#000000"}
    for whose, up, letters in ((rank, height / 2, "Q"), (owner, -height / 2, "KV")):
        colour = shade(SERIES[whose % len(SERIES)], 0 if share else 1, 2)
        edges = [y + up - height / 2, y + up + height / 2]
        ax.fill_between([x - side, x + side], *edges, color=colour, linewidth=0)
        ax.text(x, y + up, f"{letters} {pieces[whose]}", **text)
    edge = [x - side, x + side, x + side, x - side, x - side]
    ax.plot(edge, [y - height, y - height, y + height, y + height, y - height], color=INK, lw=0.7)
    outside = y + math.copysign(height + 0.15, y)
    words = f"needs {share:.0%}" if share else "idle"
    ax.text(x, outside, words, **(text | {"fontsize": 7, "color": INK}))


def _send(ax: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """Paint an arrow of the keys' colour from rank to rank, outside the boxes."""
    gap = HALF_NODE * 1.55 / math.dist(start, end)
    tail, tip = (
        tuple(a + part * (b - a) for a, b in zip(start, end, strict=True))
        for part in (gap, 1 - gap)
    )
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": 2.2, "mutation_scale": 12}
    ax.annotate("", tip, tail, arrowprops=style | {"shrinkA": 0, "shrinkB": 0})


@dataclass(frozen=True, kw_only=True)
class Blocks(Figure):
    """Attention in chunks of queries and keys: the rank that computes each block that the mask shows, and the step."""

    panels: Mapping[str, Sequence[int]]
    """By title: the rank of each chunk, in the order of the sequence. Chunk j is seen by itself and the later ones."""

    def steps(self, title: str) -> list[tuple[int, int, int]]:
        """Return chunk of the queries, chunk of the keys, and the step of a ring that brings them together."""
        ranks = self.panels[title]
        count = max(ranks) + 1
        return [
            (query, key, (ranks[query] - ranks[key]) % count)
            for query in range(len(ranks))
            for key in range(query + 1)
        ]

    def paint(self, canvas: Any) -> None:
        longest = max(map(len, self.panels.values()))
        side = 0.9 + 0.36 * longest
        canvas.set_size_inches(side * len(self.panels), side + 0.5)
        axes = canvas.subplots(1, len(self.panels), squeeze=False).ravel()
        for ax, (title, ranks) in zip(axes, self.panels.items(), strict=True):
            count = len(ranks)
            for query, key, step in self.steps(title):
                colour = shade(SERIES[ranks[query] % len(SERIES)], 0, 2)
                # On the diagonal the mask hides the keys that come later.
                upper = query if key < query else [query, query + 0.96]
                ax.fill_between([key, key + 0.96], upper, query + 0.96, color=colour, linewidth=0)
                x, y = (0.48, 0.48) if key < query else (0.3, 0.66)
                style = {"ha": "center", "va": "center", "fontsize": 8, "color": "#000000"}
                ax.text(key + x, query + y, step, **style)
            ax.set(xlim=(0, count), ylim=(count, 0), aspect="equal", title=title, xlabel="keys")
            for set_ticks in (ax.set_xticks, ax.set_yticks):
                set_ticks([n + 0.5 for n in range(count)], list(map(str, range(count))))
            ax.tick_params(length=0)
            ax.grid(False)
        axes[0].set_ylabel("queries, by chunk of the sequence")
        for rank in range(max(map(max, self.panels.values())) + 1):
            colour = shade(SERIES[rank % len(SERIES)], 0, 2)
            axes[0].scatter([], [], marker="s", s=60, color=colour, label=f"rank {rank}")
        handles = axes[0].get_legend_handles_labels()
        canvas.legend(*handles, loc="outside lower center", ncols=8)
