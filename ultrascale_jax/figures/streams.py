"""The timeline of a step: a row of operations for each stream of a GPU, as a picture and in Chrome's trace format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ultrascale_jax.figures.figure import Figure, legend, resize, rows_of
from ultrascale_jax.figures.palette import LOOP, kind_colours


@dataclass(frozen=True, kw_only=True)
class Event:
    """One operation of a stream, in seconds."""

    name: str
    start: float
    duration: float
    kind: str

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True, kw_only=True)
class Streams(Figure):
    """A step: a row of operations for each stream."""

    streams: Mapping[str, Sequence[Event]]
    step_s: float

    @property
    def detail(self) -> tuple[float, float] | None:
        """Start and end of the part with the most operations between events of kind `loop`; of equal ones the last."""
        busiest = max(self.streams.values(), key=len, default=())
        loops = sorted((e.start, e.end) for e in busiest if e.kind == LOOP)
        borders = [0.0, *(border for loop in loops for border in loop), self.step_s]
        parts = list(zip(borders[::2], borders[1::2], strict=True))
        counts = [sum(start <= e.start < end for e in busiest) for start, end in parts]
        _, chosen = max(zip(counts, parts, strict=True))
        return chosen if loops and chosen[1] > chosen[0] else None

    @property
    def height(self) -> float:
        """Height of the picture in inches."""
        return 0.6 + (1 + bool(self.detail)) * (0.7 + 0.42 * len(self.streams))

    @property
    def colours(self) -> dict[str, str]:
        every = (e.kind for events in self.streams.values() for e in events)
        return kind_colours(list(dict.fromkeys(every)))

    def paint(self, canvas: Any) -> None:
        """Draw the full step, and below it the part that is shown operation by operation."""
        windows = [(0.0, self.step_s)] + ([self.detail] if self.detail else [])
        resize(canvas, 10.5, self.height)
        axes = canvas.subplots(len(windows), 1, squeeze=False).ravel()
        look = self.colours
        for ax, window in zip(axes, windows, strict=True):
            start, end = (1e3 * edge for edge in window)
            for y, events in enumerate(self.streams.values()):
                for kind, colour in look.items():
                    spans = [(1e3 * e.start, 1e3 * e.duration) for e in events if e.kind == kind]
                    spans = [(at, width) for at, width in spans if at < end and at + width > start]
                    ax.broken_barh(spans, (y - 0.38, 0.76), facecolors=colour, linewidth=0)
            ax.set_xlim(start, end)
            rows_of(ax, list(self.streams), "ms")
        if self.detail:
            axes[0].set_title("the whole step")
            axes[1].set_title("operation by operation")
        for kind, colour in look.items():
            axes[0].scatter([], [], marker="s", s=60, color=colour, label=kind)
        legend(canvas, axes[0])


def events_of(streams: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, list[Event]]:
    """Return streams of a simulated step (`Timeline.streams`) as events: name, start, duration, kind."""
    return {
        stream: [Event(name=str(e[0]), start=e[1], duration=e[2], kind=str(e[3])) for e in events]
        for stream, events in streams.items()
    }


def chrome_trace(streams: Mapping[str, Sequence[tuple]]) -> dict[str, Any]:
    """Return streams in Chrome's trace format, which https://ui.perfetto.dev opens; a row for each stream.

    An event is its name, start and duration in seconds, kind, and where it comes from.
    """
    events: list[dict[str, Any]] = []
    for row, (stream, shown) in enumerate(streams.items()):
        place = {"pid": 0, "tid": row}
        names = {"thread_name": {"name": stream}, "thread_sort_index": {"sort_index": row}}
        events += [{"ph": "M", "name": n, "args": args, **place} for n, args in names.items()]
        for name, start_s, duration_s, kind, where in shown:
            times = {"ts": start_s * 1e6, "dur": duration_s * 1e6}
            about = {"name": name, "cat": kind, "args": {"where": where}}
            events.append({"ph": "X", **about, **times, **place})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
