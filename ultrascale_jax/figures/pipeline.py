"""A pipeline's schedule: a row of operations for each rank, and the activations that it keeps over time."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from ultrascale_jax.figures.figure import Figure, legend, rows_of
from ultrascale_jax.figures.palette import INK, OPERATIONS, PAPER, SERIES, shade

MOST_LINES = len(SERIES)
"""Ranks whose activations are drawn, spread evenly over all of them."""

LEGIBLE = 5.5
"""Points of the smallest number that is written."""


class Operation(NamedTuple):
    """One operation of a rank."""

    rank: int
    kind: str
    """F, B or W."""
    microbatch: int
    chunk: int
    """Stage of the rank, from 0."""
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Pipeline(Figure):
    """A schedule: a row of operations for each rank, and the micro-batches that it keeps over time."""

    operations: Sequence[Operation]
    ranks: int
    chunks: int
    """Stages of a rank."""
    kinds: Mapping[str, str]
    """Names of the kinds of operation in the schedule."""
    unit: str

    @property
    def width(self) -> float:
        """Time of the full step."""
        return max(op.end for op in self.operations)

    def paint(self, canvas: Any) -> None:
        """Paint the operations, and below them the micro-batches that each rank keeps."""
        narrowest = min(op.end - op.start for op in self.operations)
        inches = min(28.0, max(7.0, 1.2 + 0.21 * self.width / narrowest))
        heights = 0.36 * self.ranks, 1.1
        canvas.set_size_inches(inches, 1.5 + sum(heights))
        ax, below = canvas.subplots(2, 1, sharex=True, height_ratios=heights)
        self.paint_operations(ax, 72 * (inches - 1.2))
        self._paint_kept(below)
        _name(ax, self.kinds, self.chunks)
        legend(canvas, ax)

    def paint_operations(self, ax: Any, points: float) -> None:
        """Paint a row for each rank in axes `points` wide; in every operation its micro-batch, later chunks lighter.

        Grey time is idle.
        """
        narrowest = min(op.end - op.start for op in self.operations)
        digits = max(len(str(op.microbatch)) for op in self.operations)
        size = min(7.5, points * narrowest / self.width / (0.68 * digits))
        back = (-0.46, self.ranks - 0.08)
        ax.broken_barh([(0, self.width)], back, facecolors=INK, alpha=0.06)
        text = {"ha": "center", "va": "center", "fontsize": size, "color": "#000000"}
        for op in self.operations:
            colour = shade(OPERATIONS[op.kind], op.chunk, self.chunks)
            style = {"facecolors": colour, "edgecolor": PAPER, "linewidth": 0.6}
            ax.broken_barh([(op.start, op.end - op.start)], (op.rank - 0.46, 0.92), **style)
            if size >= LEGIBLE:
                ax.text(op.start + (op.end - op.start) / 2, op.rank, op.microbatch, **text)
        ax.set_xlim(0, self.width)
        rows_of(ax, [f"rank {rank}" for rank in range(self.ranks)], "", lines=False)

    def kept(self, rank: int) -> tuple[list[float], list[float]]:
        """Return times, and the micro-batches that a rank keeps from each on, counted through all of its layers.

        A stage keeps a micro-batch from its first operation to its last.
        """
        spans: dict[tuple[int, int], list[float]] = {}
        for op in self.operations:
            if op.rank == rank:
                times = round(op.start, 9), round(op.end, 9)
                spans.setdefault((op.microbatch, op.chunk), []).extend(times)
        changes = Counter(min(times) for times in spans.values())
        changes.subtract(max(times) for times in spans.values())
        moments = sorted(changes)
        counts = accumulate((changes[moment] / self.chunks for moment in moments), initial=0.0)
        return [0.0, *moments], [*counts]

    def _paint_kept(self, ax: Any) -> None:
        """Paint the micro-batches that each rank keeps."""
        step = -(-self.ranks // MOST_LINES)
        for rank, colour in zip(range(0, self.ranks, step), SERIES, strict=False):
            ax.step(*self.kept(rank), where="post", color=colour, label=f"rank {rank}")
        ax.set(xlabel=self.unit, ylabel="micro-batches\nkept")
        ax.set_ylim(bottom=0)
        ax.yaxis.get_major_locator().set_params(integer=True, nbins=5)
        ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)


@dataclass(frozen=True, kw_only=True)
class Pipelines(Figure):
    """Schedules one above the other, on one axis of time."""

    panels: Mapping[str, Pipeline]
    """By title."""

    def paint(self, canvas: Any) -> None:
        inches = 8.5
        rows = [one.ranks for one in self.panels.values()]
        canvas.set_size_inches(inches, 1.5 + sum(0.33 + 0.16 * ranks for ranks in rows))
        axes = canvas.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows).ravel()
        longest = max(one.width for one in self.panels.values())
        kinds: dict[str, list[str]] = {}
        for ax, (title, one) in zip(axes, self.panels.items(), strict=True):
            one.paint_operations(ax, 72 * (inches - 0.8) * one.width / longest)
            ax.set_xlim(0, longest)
            ax.set_title(title, loc="left", fontsize=9)
            ax.set_yticks([0, one.ranks - 1], ["rank 0", f"rank {one.ranks - 1}"][: one.ranks])
            ax.tick_params(axis="x", length=0)
            ax.spines[["left", "bottom"]].set_visible(False)
            for kind, words in one.kinds.items():
                kinds.setdefault(kind, []).append(words)
        axes[-1].set_xlabel(next(iter(self.panels.values())).unit)
        names = {kind: " or ".join(dict.fromkeys(words)) for kind, words in kinds.items()}
        _name(axes[0], names, max(one.chunks for one in self.panels.values()))
        canvas.legend(
            *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names)
        )


def _name(ax: Any, kinds: Mapping[str, str], chunks: int) -> None:
    """Add entries of the legend: a colour for each kind and chunk."""
    for kind, words in kinds.items():
        for chunk in range(chunks):
            name = f"{words}{f', chunk {chunk}' if chunks > 1 else ''}"
            colour = shade(OPERATIONS[kind], chunk, chunks)
            ax.scatter([], [], marker="s", s=60, color=colour, label=name)
