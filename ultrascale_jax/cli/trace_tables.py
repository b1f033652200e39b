"""Tables of a report of `plan/profile/report.py`: what traced steps of a run spent their time on."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table

from ultrascale_jax.cli import output

ALONE = "one device"
"""The axes of a collective whose groups have one member."""


def tables(report: Mapping[str, Any]) -> Group:
    """Return a report as tables; times in milliseconds of a step."""
    found, forecast = report["measured"], report["predicted"]
    steps, devices = report["stop"] - report["first"], report["devices"]
    of = f"a step of {steps} ({report['first']} to {report['stop'] - 1})"
    slowest = max(devices, key=lambda device: device["step_s"])
    mean = f", mean of {len(devices)} devices, the slowest {slowest['name']}" * (len(devices) > 1)
    parts = [
        output.plain(f"profile of {of} on {report['device_kind']}{mean}"),
        _time(found, forecast),
        _blocks(found, forecast),
    ]
    if found["collectives"]:
        parts.append(_collectives(found, forecast))
    predicted = f"predicted for {report['predicted_for']}, links as usual"
    return Group(*parts, output.plain(report["no_prediction"] or predicted))


def _time(found: dict[str, Any], forecast: dict[str, Any] | None) -> Table:
    """Return the table of classes of kernels, exposed communication and idle time, which add up to the step."""
    table = output.table(["where a step went"], ["ms", "of the step", "predicted ms"])

    def row(name: str, *path: str) -> None:
        seconds = _at(found, *path)
        share = seconds / found["step_s"] if found["step_s"] else 0.0
        table.add_row(name, _ms(seconds), f"{share:.1%}", _predicted(forecast, *path))

    for name in _names("kernels_s", found, forecast):
        row(name, "kernels_s", name)
    for axes in _names("exposed_s", found, forecast):
        row(f"exposed communication, {axes or ALONE}", "exposed_s", axes)
    row("waiting for copies", "waiting_for_copies_s")
    row("idle", "idle_s")
    row("step", "step_s")
    return table


def _blocks(found: dict[str, Any], forecast: dict[str, Any] | None) -> Table:
    """Return the table of the kernels' time by block."""
    table = output.table(["kernels by block"], ["ms", "of the step", "predicted ms"])
    for name in _names("blocks_s", found, forecast):
        seconds = _at(found, "blocks_s", name)
        share = seconds / found["step_s"] if found["step_s"] else 0.0
        table.add_row(name, _ms(seconds), f"{share:.1%}", _predicted(forecast, "blocks_s", name))
    return table


def _collectives(found: dict[str, Any], forecast: dict[str, Any] | None) -> Table:
    """Return the table of collectives, hidden or not."""
    columns = ["ms", "exposed ms", "predicted ms", "exposed, predicted ms"]
    table = output.table(["collective", "axes"], columns)
    known = {(c["kind"], c["axes"]): c for c in (forecast or {}).get("collectives", ())}
    for c in sorted(found["collectives"], key=lambda c: -c["exposed_s"]):
        other = known.get((c["kind"], c["axes"]))
        table.add_row(
            c["kind"],
            c["axes"] or ALONE,
            _ms(c["total_s"]),
            _ms(c["exposed_s"]),
            _predicted(other, "total_s"),
            _predicted(other, "exposed_s"),
        )
    return table


def _names(part: str, found: dict[str, Any], forecast: dict[str, Any] | None) -> list[str]:
    """Return the names in a part of the measured step, and those that only the prediction has."""
    return list(found[part] | (forecast or {}).get(part, {}))


def _at(part: dict[str, Any], *path: str) -> float:
    """Return a number of a report; 0 if it has none."""
    for name in path[:-1]:
        part = part[name]
    return part.get(path[-1], 0.0)


def _predicted(forecast: dict[str, Any] | None, *path: str) -> str:
    return "-" if forecast is None else _ms(_at(forecast, *path))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"
