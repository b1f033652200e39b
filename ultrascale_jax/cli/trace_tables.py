"""Tables of a report of `plan/profile/report.py`: the time of a run's traced steps by part."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table

from ultrascale_jax.cli import output
from ultrascale_jax.units import milliseconds

ALONE = "one device"
"""The axes of a collective whose groups have one member."""

SECONDS = ("total_s", "exposed_s")
"""Times of a collective."""


def tables(report: Mapping[str, Any]) -> Group:
    """Return a report as tables; times in milliseconds of a step."""
    measured, forecast = report["measured"], report["predicted"]
    steps, devices = report["stop"] - report["first"], report["devices"]
    of = f"a step of {steps} ({report['first']} to {report['stop'] - 1})"
    slowest = max(devices, key=lambda device: device["step_s"])
    mean = f", mean of {len(devices)} devices, the slowest {slowest['name']}" * (len(devices) > 1)
    predicted = f"predicted for {report['predicted_for']}, links as usual"
    return Group(
        output.plain(f"profile of {of} on {report['device_kind']}{mean}"),
        _shares("where a step went", measured, forecast, ("kernels_s", "exposed_s", "step")),
        _shares("kernels by block", measured, forecast, ("blocks_s",)),
        *([_collectives(measured, forecast)] if measured["collectives"] else []),
        output.plain(report["no_prediction"] or predicted),
    )


def _shares(
    title: str, breakdown: dict[str, Any], forecast: dict[str, Any] | None, parts: tuple[str, ...]
) -> Table:
    """Return the table of parts of a step, the measured and the predicted ones."""
    table = output.table([title], ["ms", "of the step", "predicted ms"])
    for part in parts:
        measured, predicted = _seconds(breakdown, part), _seconds(forecast or {}, part)
        for name in measured | predicted:
            seconds = measured.get(name, 0.0)
            share = seconds / breakdown["step_s"] if breakdown["step_s"] else 0.0
            forecast_s = None if forecast is None else predicted.get(name, 0.0)
            table.add_row(name, milliseconds(seconds), f"{share:.1%}", milliseconds(forecast_s))
    return table


def _seconds(breakdown: Mapping[str, Any], part: str) -> dict[str, float]:
    """Return the seconds of a part by name; `step` is the time in which nothing runs, and the sum of all parts."""
    if part == "step":
        names = {"waiting_for_copies_s": "waiting for copies", "idle_s": "idle", "step_s": "step"}
        return {words: breakdown.get(name, 0.0) for name, words in names.items()}
    seconds = breakdown.get(part, {})
    if part == "exposed_s":
        return {f"exposed communication, {axes or ALONE}": s for axes, s in seconds.items()}
    return seconds


def _collectives(breakdown: dict[str, Any], forecast: dict[str, Any] | None) -> Table:
    """Return the table of collectives, hidden or not."""
    columns = ["ms", "exposed ms", "predicted ms", "exposed, predicted ms"]
    table = output.table(["collective", "axes"], columns)
    predictions = {(c["kind"], c["axes"]): c for c in (forecast or {}).get("collectives", ())}
    for c in sorted(breakdown["collectives"], key=lambda c: -c["exposed_s"]):
        prediction = predictions.get((c["kind"], c["axes"]), {})
        seconds = *(c[name] for name in SECONDS), *(prediction.get(name) for name in SECONDS)
        table.add_row(c["kind"], c["axes"] or ALONE, *map(milliseconds, seconds))
    return table
