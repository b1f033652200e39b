"""The timeline of a step: a row of operations for each stream of a GPU; on the page it can be zoomed."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ultrascale_jax.figures.figure import Figure, Table, check_numbers, legend, resize, rows_of
from ultrascale_jax.figures.palette import LOOP, kind_colours

FINEST = 50_000
"""Part of the step below which neighbours of a timeline are drawn together: the deepest zoom shows 1/5,000 of it."""

ROW = 34
"""Height of a stream on the page."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One operation of a stream, in seconds."""

    name: str
    start: float
    duration: float
    kind: str

    def __post_init__(self):
        check_numbers(self.start, self.duration)

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

    def table(self) -> Table:
        rows: dict[tuple[str, str], tuple[int, float]] = {}
        for stream, events in self.streams.items():
            for e in events:
                count, total = rows.get((stream, e.kind), (0, 0.0))
                rows[stream, e.kind] = count + 1, total + e.duration
        share = 100 / self.step_s if self.step_s else 0.0
        body = tuple(
            (stream, kind, count, 1e3 * total, share * total)
            for (stream, kind), (count, total) in rows.items()
        )
        head = ("stream", "kind", "operations", "time (ms)", "of the step (%)")
        return Table(head=head, rows=body)

    def paint(self, canvas: Any) -> None:
        """Draw the whole step, and below it the part that is shown operation by operation."""
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

    def picture(self, svg: str, label: str) -> str:
        """Return the timeline as an SVG of 10,000 units for the step, which the page's script zooms."""
        scale, total, moves = 1e4 / self.step_s, ROW * len(self.streams), dict(MOVES)
        names = "".join(f"<span>{html.escape(name)}</span>" for name in self.streams)
        ticks = "".join(f"<span>{1e3 * self.step_s * n / 6:.1f} ms</span>" for n in range(7))
        keys = "".join(
            f'<span><i style="background:{colour}"></i>{html.escape(kind)}</span>'
            for kind, colour in self.colours.items()
        )
        place = ""
        if self.detail:
            start, end = (edge * scale for edge in self.detail)
            place = f' data-from="{start:.4f}" data-width="{end - start:.4f}"'
            moves["detail"] = "operation by operation"
        buttons = "".join(
            f'<button type="button" data-move="{m}">{text}</button>' for m, text in moves.items()
        )
        return f"""<div class="zoom" data-ms="{1e3 * self.step_s:.6g}"{place}>{buttons}
<div class="streams"><div class="names">{names}</div>
<svg role="img" aria-label="{label}" viewBox="0 0 10000 {total}" height="{total}"
 preserveAspectRatio="none">{self._bars(scale)}</svg>
<div class="ticks">{ticks}</div></div><div class="keys">{keys}</div></div>"""

    def _bars(self, scale: float) -> str:
        """Return a rectangle for each operation, with a tooltip."""
        look, bars = self.colours, []
        for row, events in enumerate(self.streams.values()):
            for e in merged(events, self.step_s / FINEST):
                tip = f"{e.name} ({e.kind}): {1e3 * e.duration:.3g} ms from {1e3 * e.start:.4g} ms"
                size = f'width="{max(e.duration * scale, 0.3):.2f}" height="{ROW - 6}"'
                bars.append(
                    f'<rect x="{e.start * scale:.2f}" y="{row * ROW + 3}" {size} '
                    f'fill="{look[e.kind]}"><title>{html.escape(tip)}</title></rect>'
                )
        return "".join(bars)


def events_of(streams: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, list[Event]]:
    """Return streams of a simulated step (`Timeline.streams`) as events: name, start, duration, kind."""
    return {
        stream: [Event(name=str(e[0]), start=e[1], duration=e[2], kind=str(e[3])) for e in events]
        for stream, events in streams.items()
    }


def side_by_side(name: str, title: str, caption: str, steps: Mapping[str, Streams]) -> Streams:
    """Return of each step, by its label, the part that is shown operation by operation (`detail`), all from 0 s on.

    A step without loops is shown as a whole; a row that has nothing but copies is left out.
    """
    rows: dict[str, list[Event]] = {}
    for label, step in steps.items():
        start, end = step.detail or (0.0, step.step_s)
        for stream, events in step.streams.items():
            shown = [
                replace(e, start=e.start - start)
                for e in events
                if start <= e.start < end and e.kind != LOOP
            ]
            if any(e.kind != "copy" for e in shown):
                rows[f"{label}: {stream}"] = shown
    last = max((e.end for events in rows.values() for e in events), default=0.0)
    return Streams(name=name, title=title, caption=caption, streams=rows, step_s=last)


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


MOVES = {"in": "zoom in", "out": "zoom out", "left": "←", "right": "→", "all": "whole step"}


def merged(events: Sequence[Event], shortest: float) -> list[Event]:
    """Sort `events` by start, and merge neighbours of one kind that touch and are shorter than `shortest`."""
    found: list[Event] = []
    counts: list[int] = []
    for event in sorted(events, key=lambda e: e.start):
        last = found[-1] if found else None
        if (
            last is not None
            and event.start - last.end < shortest
            and last.kind == event.kind
            and event.duration < shortest > last.duration
        ):
            counts[-1] += 1
            name, end = f"{counts[-1]} short operations", max(last.end, event.end)
            duration = end - last.start
            found[-1] = Event(name=name, start=last.start, duration=duration, kind=last.kind)
        else:
            found.append(event)
            counts.append(1)
    return found
