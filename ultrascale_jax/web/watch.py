"""Watch runs on a page of the browser, live or finished: `ultrascale watch RUN_DIR...`.

The page has loss, learning rate, gradient norm, speed, memory and every other number of `metrics.jsonl`, goodput by
class, and events; several runs are drawn into the same charts. It loads nothing from the network. Only this machine can
open it, by the address that is printed; `--host` opens it to others.

    ultrascale watch out/demo
    ultrascale watch out/a out/b
"""

import contextlib
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from ultrascale_jax import units
from ultrascale_jax.cli import command_line
from ultrascale_jax.config import UserError, require
from ultrascale_jax.launch.events import FILE_NAME, is_number, read_events
from ultrascale_jax.launch.goodput import CLASSES, Ledger, read_ledger
from ultrascale_jax.launch.run_files import METRICS
from ultrascale_jax.storage.foreign import read_json
from ultrascale_jax.web.metrics import RunMetrics
from ultrascale_jax.web.server import Server

FAULTS = (
    *("failure", "hang", "save_failed", "quarantined", "skipped", "rerun", "replicas"),
    *("straggler", "died", "gave_up"),
)
SHOWN = (*FAULTS, "start", "anew", "lock", "saved", "end")
"""Kinds of events that the page shows."""

MOST_EVENTS, MOST_SAMPLES, LONGEST_TEXT = 200, 10, 4000
"""The newest events of a run, and texts that its model wrote, that the page shows, and the characters of each."""

MOST_POINTS = 4000
"""Points of one field in one answer."""

UNTOLD = {
    *("kind", "time", "pid", "attempt", "step", "traceback", "rows", "batch_hash", "rank", "host"),
}
"""Fields of an event that its text leaves out."""

NAMELESS = {"summary", "problem", "why", "reason", "note", "verdict"}
"""Fields of an event whose text needs no name before it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `ultrascale watch`."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories, or a folder of some."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface of this machine."""
    port: int = 0
    """Port to listen on; 0 is any that is free."""


def main(argv: Sequence[str]) -> None:
    with command_line.user_errors():
        prog = "ultrascale watch"
        options = command_line.read(Options, argv, prog=prog, description=__doc__ or "")
        runs = find_runs(options.run_dirs)
        server = live_server(runs, options.host, options.port)
    server.serve(units.counted(len(runs), "run"))


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the run directories among `paths`, and inside the other paths."""
    runs: list[Path] = []
    for path in paths:
        inside = [path] if _is_run(path) else sorted(filter(_is_run, path.glob("*")))
        fix = f"holds no {METRICS} or {FILE_NAME}; give the run directory of a training run"
        require(bool(inside), "run_dirs", str(path), fix)
        runs += inside
    require(bool(runs), "run_dirs", "", "give a run directory")
    return runs


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (METRICS, FILE_NAME))


def live_server(run_dirs: Sequence[Path], host: str, port: int) -> Server:
    """Return the server of the live page, which asks for `/state?x=step&points=600`, perhaps with first and last."""
    runs = [WatchedRun(path) for path in run_dirs]

    def state(query: Mapping[str, str]) -> dict[str, Any]:
        x, points = query["x"], min(MOST_POINTS, max(1, int(query["points"])))
        if x not in ("step", "time"):
            raise ValueError(f"x={x!r}")
        first, last = float(query.get("first", "-inf")), float(query.get("last", "inf"))
        shown = [run.state(x, first, last, points) for run in runs]
        return {"runs": shown, "classes": CLASSES, "faults": FAULTS}

    return Server("live.html", {"/state": state}, host, port)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The newest numbers of a run: a row of the page's table, whose columns are these fields."""

    step: float | None
    of: float | None
    loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    mfu: float | None
    goodput: float
    restarts: int
    unreadable_rows: int | None


class WatchedRun:
    """One run directory, as the page sees it; any thread may ask."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.metrics = RunMetrics(run_dir)
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._events: list[dict[str, Any]] = []

    def state(self, x: str, first: float, last: float, points: int) -> dict[str, Any]:
        """Return the state for the page, with the rows since the last call.

        Every metric has at most so many `points` over `x` from `first` to `last`, as `RunMetrics.thinned` has them.
        """
        with self._lock:
            metrics, ledger, events = self.metrics, read_ledger(self.run_dir), self._read_events()
            metrics.update()
            return {
                "path": str(self.run_dir),
                "series": {
                    name: metrics.thinned(name, x, first, last, points) for name in metrics.fields
                },
                "summary": dataclasses.asdict(self._summary(ledger)),
                "events": self._texts(events, SHOWN, MOST_EVENTS),
                "samples": self._texts(events, ("sample",), MOST_SAMPLES),
                "goodput": ledger.goodput,
                "seconds": ledger.seconds,
            }

    def _read_events(self) -> list[dict[str, Any]]:
        """Return the events, read again if their file has changed: the page asks every few seconds."""
        with contextlib.suppress(OSError):
            status = (self.run_dir / FILE_NAME).stat()
            if (seen := (status.st_ino, status.st_size)) != self._seen:
                self._seen, self._events = seen, read_events(self.run_dir)
        return self._events

    def _texts(self, events: list[dict], kinds: Sequence[str], most: int) -> list[dict[str, Any]]:
        """Return the newest events of some kinds, each with its step and a text."""
        newest = [event for event in events if event["kind"] in kinds][-most:]
        return [
            {"step": self._step(event), "time": event["time"], "kind": event["kind"]}
            | {"text": str(event.get("text") or sentence(event))[:LONGEST_TEXT]}
            for event in newest
        ]

    def _step(self, event: Mapping[str, Any]) -> float | None:
        step = event.get("step")
        return step if is_number(step) else self.metrics.step_at(event["time"])

    def _summary(self, ledger: Ledger) -> Summary:
        names = ("step", "loss", "eval_loss", "tokens_per_s", "mfu")
        return Summary(
            **{name: self.metrics.newest(name) for name in names},
            of=self._total(),
            goodput=ledger.goodput,
            restarts=ledger.restarts,
            unreadable_rows=self.metrics.damaged or None,
        )

    def _total(self) -> float | None:
        """Return the steps of the run, by its configuration."""
        try:
            steps = read_json(self.run_dir / "config.json")["train"]["steps"]
        except (UserError, OSError, LookupError, TypeError):
            return None
        return steps if is_number(steps) else None


def sentence(event: Mapping[str, Any]) -> str:
    """Return the details of an event and its writer as text, without its kind, step and time."""
    details = {name: value for name, value in event.items() if name not in UNTOLD}
    said = ", ".join(_phrase(*item) for item in details.items() if item[1] not in ({}, [], ""))
    writer = "supervisor" if event.get("rank") is None else f"rank {event['rank']}"
    return f"{said} ({writer} on {event.get('host')})".lstrip()


def _phrase(name: str, value: Any) -> str:
    if name == "bytes" and is_number(value):
        return units.size(value)
    if name in NAMELESS:
        return _text(value)
    words = name.replace("_", " ")
    if name.endswith("_s") and is_number(value):
        return f"{words[:-2]} {value:.3g} s"
    return f"{words} {_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(_phrase(*item) for item in value.items())
    if isinstance(value, list):
        separator = "; " if any(isinstance(one, Mapping) for one in value) else " "
        return separator.join(map(_text, value))
    if value is None:
        return "not finite"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
