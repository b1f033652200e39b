"""Timelines of several steps, one above the other."""

from collections.abc import Mapping
from dataclasses import replace

from ultrascale_jax.figures.palette import LOOP
from ultrascale_jax.figures.streams import Event, Streams


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
