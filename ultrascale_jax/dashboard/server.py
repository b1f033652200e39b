"""Serve the live page of runs: one local HTTP server, one page, and JSON that it asks for.

    /            the page (`page.html`)
    /state       of each run: newest row, number of rows, fields, events, ledger
    /series      points of fields of one run, thinned out to what a chart shows

Every request needs the token of the page's address, and a `Host` that the server was started for: a page of another
site that the browser has open can guess neither.
"""

import hmac
import json
import math
import secrets
import threading
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from ultrascale_jax.config.base import UserError
from ultrascale_jax.config.foreign import read_json
from ultrascale_jax.dashboard.series import RunMetrics
from ultrascale_jax.launch.events import FILE_NAME, finite, is_number, read_events
from ultrascale_jax.launch.goodput import CLASSES, read_ledger

SHOWN = {
    *("start", "failure", "hang", "save_failed", "quarantined", "anew", "lock_taken_over"),
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
    left_out = {"kind", "time", "monotonic", "boot", "pid", "attempt", "step", "began", "traceback"}
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
    nonce = secrets.token_urlsafe(16)
    policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'"
    # Text from a run stands in a script: no `</script>` may end it.
    inside = json.dumps(finite({"data": data, "token": token})).replace("<", "\\u003c")
    text = text.replace("NONCE", nonce).replace("POLICY", policy).replace('"SETTINGS"', inside)
    return text, policy


class Dashboard(ThreadingHTTPServer):
    """The server; `url` is the page's address, with the token."""

    daemon_threads = True

    def __init__(self, run_dirs: Sequence[Path], host: str, port: int):
        self.runs = [WatchedRun(path) for path in run_dirs]
        self.token = secrets.token_urlsafe(24)
        super().__init__((host, port), Handler)
        own = {host, "localhost", "127.0.0.1"} if host in ("127.0.0.1", "0.0.0.0") else {host}
        self.hosts = {f"{name}:{self.server_port}" for name in own}
        """Values of `Host` that are answered; any, where the server listens on all interfaces."""
        self.is_open = host == "0.0.0.0"

    @property
    def url(self) -> str:
        host = str(self.server_address[0])
        return f"http://{host}:{self.server_port}/?token={self.token}"


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"

    @property
    def dashboard(self) -> Dashboard:
        return cast(Dashboard, self.server)

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        host = self.headers.get("Host", "")
        if not (self.dashboard.is_open or host in self.dashboard.hosts):
            return self.refuse(HTTPStatus.MISDIRECTED_REQUEST, "another host")
        if not hmac.compare_digest(query.get("token", "").encode(), self.dashboard.token.encode()):
            return self.refuse(
                HTTPStatus.FORBIDDEN, "the token is missing: open the printed address"
            )
        if parts.path == "/":
            text, policy = page(token=self.dashboard.token)
            return self.answer(text.encode(), "text/html; charset=utf-8", policy)
        if parts.path not in ("/state", "/series"):
            return self.refuse(HTTPStatus.NOT_FOUND, "no such page")
        try:
            content = self.state() if parts.path == "/state" else self.series(query)
        except (KeyError, ValueError, IndexError) as error:
            return self.refuse(HTTPStatus.BAD_REQUEST, f"not understood: {error}")
        self.answer(json.dumps(finite(content)).encode(), "application/json")

    def state(self) -> dict[str, Any]:
        """Answer /state: all runs."""
        states = []
        for run in self.dashboard.runs:
            with run.lock:
                run.update()
                states.append(run.state())
        return {"runs": states, "classes": CLASSES}

    def series(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Answer /series?run=0&fields=loss,lr&x=step&first=0&last=100&points=600."""
        run, x = self.dashboard.runs[int(query["run"])], query["x"]
        if x not in AXES:
            raise ValueError(f"x={x!r}")
        first, last = float(query.get("first", -math.inf)), float(query.get("last", math.inf))
        points = min(MOST_POINTS, max(1, int(query["points"])))
        with run.lock:
            return run.series(query["fields"].split(","), x, first, last, points)

    def answer(self, body: bytes, kind: str, policy: str = "default-src 'none'") -> None:
        self.send_response(HTTPStatus.OK)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": f"{policy}; frame-ancestors 'none'; base-uri 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: HTTPStatus, why: str) -> None:
        self.send_error(status, explain=why)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the address in each line has the token."""
