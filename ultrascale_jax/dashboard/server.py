"""Serve the live page of runs, by the server of `local_server.py`.

/            the page (`page.html`)
/state       of each run: newest row, number of rows, fields, events, ledger
/series      points of fields of one run, thinned out to what a chart shows
"""

import math
import threading
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ultrascale_jax.config.base import UserError
from ultrascale_jax.config.foreign import read_json
from ultrascale_jax.dashboard.local_server import LocalServer, fill
from ultrascale_jax.dashboard.series import RunMetrics
from ultrascale_jax.launch.events import FILE_NAME, is_number, read_events
from ultrascale_jax.launch.goodput import CLASSES, read_ledger

SHOWN = {
    *("start", "failure", "hang", "save_failed", "quarantined", "anew", "lock"),
    *("skipped", "rerun", "replicas", "straggler", "died", "stuck", "gave_up", "end", "saved"),
}
"""Kinds of events that the page shows."""

MOST_EVENTS = 500
"""The newest events of a run that the page shows."""

MOST_SAMPLES = 10
"""The newest texts of a run that the page shows."""

LONGEST_SAMPLE = 4000
"""Characters of a text."""

MOST_POINTS = 4000
"""Of one field in one answer."""


class WatchedRun:
    """One run directory, as the page sees it."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.metrics = RunMetrics(run_dir)
        self.lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._events: list[dict[str, Any]] = []
        self._samples: list[dict[str, Any]] = []
        self._goodput: dict[str, Any] = {}

    def update(self) -> None:
        """Read what the run has written since the last call."""
        self.metrics.update()
        try:
            status = (self.run_dir / FILE_NAME).stat()
        except OSError:
            return
        if (seen := (status.st_ino, status.st_size)) == self._seen:
            return
        self._seen = seen
        events = read_events(self.run_dir)
        self._events = [event for event in events if event["kind"] in SHOWN][-MOST_EVENTS:]
        self._samples = [event for event in events if event["kind"] == "sample"][-MOST_SAMPLES:]
        ledger = read_ledger(self.run_dir)
        self._goodput = {
            "goodput": ledger.goodput,
            "seconds": ledger.seconds,
            "restarts": ledger.restarts,
            "steps_again": ledger.steps_again,
        }

    def state(self) -> dict[str, Any]:
        """Return what the page shows beside the charts."""
        metrics = self.metrics
        return {
            "name": self.run_dir.name,
            "path": str(self.run_dir),
            "rows": metrics.steps.length + metrics.evaluations.length,
            "damaged": metrics.damaged,
            "fields": metrics.fields,
            "last": metrics.last,
            "total": self._total(),
            "events": [
                {"step": self._step(event), "time": event["time"], "kind": event["kind"]}
                | {"text": _words(event)}
                for event in self._events
            ],
            "samples": [
                {"step": self._step(event), "time": event["time"]}
                | {"text": str(event.get("text", ""))[:LONGEST_SAMPLE]}
                for event in self._samples
            ],
            "ledger": self._goodput,
        }

    def _step(self, event: Mapping[str, Any]) -> float | None:
        own = event.get("step")
        return own if is_number(own) else self.metrics.step_at(event["time"])

    def _total(self) -> float | None:
        """Return the steps of the whole run, by its configuration."""
        try:
            steps = read_json(self.run_dir / "config.json")["train"]["steps"]
        except (UserError, OSError, LookupError, TypeError):
            return None
        return steps if is_number(steps) else None

    def series(self, fields: Sequence[str], x: str, first: float, last: float, points: int) -> dict:
        """Return points of each field, as `Table.thinned` does."""
        return {name: self.metrics.thinned(name, x, first, last, points) for name in fields}


def _words(event: Mapping[str, Any]) -> str:
    """Return what an event says beside its kind, step and time, in one line."""
    left_out = {"kind", "time", "monotonic", "boot", "pid", "attempt", "step", "age_s", "traceback"}
    left_out |= {"rows"} | {name for name, value in event.items() if value in ({}, [], "")}
    words = {name: f"{x:.4g}" if isinstance(x, float) else x for name, x in event.items()}
    parts = (f"{name} {value}" for name, value in words.items() if name not in left_out)
    return ", ".join(parts)[:400]


def snapshot(runs: Sequence[WatchedRun], points: int = 2000) -> dict[str, Any]:
    """Return all that the page can show of `runs`, for a page without a server."""
    states, series = [], []
    for run in runs:
        run.update()
        state = run.state()
        states.append(state)
        both = {x: run.series(state["fields"], x, -math.inf, math.inf, points) for x in AXES}
        series.append(both)
    return {"runs": states, "classes": CLASSES, "series": series}


AXES = ("step", "time")
"""Fields that a chart may have along its x axis."""


def page(data: Mapping[str, Any] | None = None, token: str = "") -> tuple[str, str]:
    """Return the page, live or with `data` of `snapshot` inside it, and its content security policy."""
    text = files("ultrascale_jax.dashboard").joinpath("page.html").read_text(encoding="utf-8")
    return fill(text, {"data": data, "token": token})


class Dashboard(LocalServer):
    """The server of the live page."""

    def __init__(self, run_dirs: Sequence[Path], host: str, port: int):
        self.runs = [WatchedRun(path) for path in run_dirs]
        routes = {"/state": self.state, "/series": self.series}
        super().__init__(host, port, lambda token: page(token=token), routes)

    def state(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Answer /state: all runs."""
        states = []
        for run in self.runs:
            with run.lock:
                run.update()
                states.append(run.state())
        return {"runs": states, "classes": CLASSES}

    def series(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Answer /series?run=0&fields=loss,lr&x=step&first=0&last=100&points=600."""
        run, x = self.runs[int(query["run"])], query["x"]
        if x not in AXES:
            raise ValueError(f"x={x!r}")
        first, last = float(query.get("first", -math.inf)), float(query.get("last", math.inf))
        points = min(MOST_POINTS, max(1, int(query["points"])))
        with run.lock:
            return run.series(query["fields"].split(","), x, first, last, points)
