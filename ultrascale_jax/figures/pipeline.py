"""A pipeline's schedule: a row of operations for each rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ultrascale_jax.figures.figure import Figure, Table, legend, rows_of
from ultrascale_jax.figures.palette import INK, OPERATIONS, PAPER, shade


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
    """A schedule: a row of operations for each rank."""

    operations: Sequence[Operation]
    in_flight: Sequence[int]
    """Each rank's most chunks between forward and backward."""
    chunks: int
    """Stages of a rank."""
    kinds: Mapping[str, str]
    """Kinds of operation, in words."""
    unit: str

    @property
    def width(self) -> float:
        """Time of the whole step."""
        return max(op.end for op in self.operations)

    def table(self) -> Table:
        rows = []
        for rank in range(len(self.in_flight)):
            busy = sum(op.end - op.start for op in self.operations if op.rank == rank)
            idle = 100 * (1 - busy / self.width)
            rows.append((f"rank {rank}", busy, idle, self.in_flight[rank]))
        head = ("", f"busy ({self.unit})", "idle (%)", "most chunks in flight")
        return Table(head=head, rows=tuple(rows))

    def paint(self, canvas: Any) -> None:
        """Paint a row for each rank; in every operation its micro-batch, later chunks lighter; what is grey is idle."""
        ranks, chunks = len(self.in_flight), self.chunks
        narrowest = min(op.end - op.start for op in self.operations)
        inches = min(28.0, max(7.0, 1.2 + 0.21 * self.width / narrowest))
        canvas.set_size_inches(inches, 1.1 + 0.36 * ranks)
        ax = canvas.subplots()
        room = 72 * (inches - 1.2) * narrowest / self.width  # points
        digits = max(len(str(op.microbatch)) for op in self.operations)
        size = min(7.5, room / (0.68 * digits))
        ax.broken_barh([(0, self.width)], (-0.46, ranks - 0.08), facecolors=INK, alpha=0.06)
        text = {"ha": "center", "va": "center", "fontsize": size, "color": "#000000"}
        for op in self.operations:
            colour = shade(OPERATIONS[op.kind], op.chunk, chunks)
            style = {"facecolors": colour, "edgecolor": PAPER, "linewidth": 0.6}
            ax.broken_barh([(op.start, op.end - op.start)], (op.rank - 0.46, 0.92), **style)
            if size >= 3:
                ax.text(op.start + (op.end - op.start) / 2, op.rank, op.microbatch, **text)
        ax.set_xlim(0, self.width)
        rows_of(ax, [f"rank {rank}" for rank in range(ranks)], self.unit, lines=False)
        for kind in dict.fromkeys(op.kind for op in self.operations):
            for chunk in range(chunks):
                name = f"{self.kinds[kind]}{f', chunk {chunk}' if chunks > 1 else ''}"
                colour = shade(OPERATIONS[kind], chunk, chunks)
                ax.scatter([], [], marker="s", s=60, color=colour, label=name)
        legend(canvas, ax)
