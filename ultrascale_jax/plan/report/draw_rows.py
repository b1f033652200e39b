"""Draws figures whose x axis is time: the streams of a GPU, and the ranks of a pipeline."""

from typing import Any

from ultrascale_jax.plan.report.canvas import legend
from ultrascale_jax.plan.report.figures import Pipeline, Streams
from ultrascale_jax.plan.report.palette import INK, OPERATIONS, PAPER, kind_colours, shade


def streams(canvas: Any, figure: Streams) -> None:
    """The whole step, and below it the part that is shown operation by operation."""
    windows = [(0.0, figure.step_s)] + ([figure.detail] if figure.detail else [])
    canvas.set_size_inches(10.5, 0.6 + len(windows) * (0.7 + 0.42 * len(figure.streams)))
    axes = canvas.subplots(len(windows), 1, squeeze=False).ravel()
    kinds = list(dict.fromkeys(e.kind for events in figure.streams.values() for e in events))
    look = kind_colours(kinds)
    for ax, window in zip(axes, windows, strict=True):
        start, end = (1e3 * edge for edge in window)
        for y, events in enumerate(figure.streams.values()):
            for kind in kinds:
                spans = [(1e3 * e.start, 1e3 * e.duration) for e in events if e.kind == kind]
                spans = [(at, width) for at, width in spans if at < end and at + width > start]
                ax.broken_barh(spans, (y - 0.38, 0.76), facecolors=look[kind], linewidth=0)
        ax.set(xlim=(start, end), ylim=(len(figure.streams) - 0.5, -0.5), xlabel="ms")
        ax.xaxis.set_major_formatter("{x:,g}")
        ax.set_yticks(range(len(figure.streams)), list(figure.streams))
        ax.tick_params(axis="y", length=0)
        ax.grid(True, axis="x")
        ax.grid(False, axis="y")
    if figure.detail:
        axes[0].set_title("the whole step")
        axes[1].set_title("operation by operation")
    for kind in kinds:
        axes[0].scatter([], [], marker="s", s=60, color=look[kind], label=kind)
    legend(canvas, axes[0])


def ticks(canvas: Any, figure: Pipeline) -> None:
    """A row for each rank; in every operation its micro-batch, later chunks lighter; what is grey is idle."""
    narrowest = min(e.duration for e in figure.operations)
    inches = min(28.0, max(7.0, 1.2 + 0.21 * figure.width / narrowest))
    canvas.set_size_inches(inches, 1.1 + 0.36 * figure.ranks)
    ax = canvas.subplots()
    room = 72 * (inches - 1.2) * narrowest / figure.width  # points
    digits = max(len(str(e.microbatch)) for e in figure.operations)
    size = min(7.5, room / (0.68 * digits))
    ax.broken_barh([(0, figure.width)], (-0.46, figure.ranks - 0.08), facecolors=INK, alpha=0.06)
    for e in figure.operations:
        colour = shade(OPERATIONS[e.kind], e.chunk, figure.chunks)
        ax.broken_barh(
            [(e.start, e.duration)],
            (e.rank - 0.46, 0.92),
            facecolors=colour,
            edgecolor=PAPER,
            linewidth=0.6,
        )
        if size >= 3:
            x = e.start + e.duration / 2
            ax.text(
                x, e.rank, e.microbatch, ha="center", va="center", fontsize=size, color="#000000"
            )
    ax.set(xlim=(0, figure.width), ylim=(figure.ranks - 0.5, -0.5), xlabel=figure.unit)
    ax.set_yticks(range(figure.ranks), [f"rank {rank}" for rank in range(figure.ranks)])
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.tick_params(axis="y", length=0)
    ax.grid(False)
    for kind in dict.fromkeys(e.kind for e in figure.operations):
        for chunk in range(figure.chunks):
            name = f"{figure.kinds[kind]}{f', chunk {chunk}' if figure.chunks > 1 else ''}"
            colour = shade(OPERATIONS[kind], chunk, figure.chunks)
            ax.scatter([], [], marker="s", s=60, color=colour, label=name)
    legend(canvas, ax)
