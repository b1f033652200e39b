"""A benchmark's results: rows of figures, as a table and as JSON.

The JSON is written anew after every row, so a benchmark that is interrupted keeps its rows. A figure that was not
measured is absent, and a part that was not run has its reason; nothing is filled in.
"""

import importlib.metadata
import json
import os
import platform
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from ultrascale_jax import __version__
from ultrascale_jax.cli import output
from ultrascale_jax.config import Config
from ultrascale_jax.launch.run_files import write_atomic
from ultrascale_jax.plan.flops import flops_per_token, mfu

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")

COLUMNS = {
    "step_ms": ("step ms (p10-p90)", ""),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "tokens_per_cpu_s": ("tokens/CPU-s", ",.0f"),
    "tflops_per_device": ("TFLOP/s", ".3g"),
    "gb_per_s": ("GB/s", ",.0f"),
    "relative": ("of its first", ".3f"),
    "of_roofline": ("of roofline", ".1%"),
    "error": ("error", ".1e"),
    "temporary_gb": ("temporary GB", ".2f"),
    "mfu": ("MFU", ".1%"),
    "peak_gb": ("peak GB", ".2f"),
    "compile_s": ("compile s", ".1f"),
    "seconds": ("step s", ".2f"),
    "bubble": ("bubble", ".1%"),
    "table_bubble": ("by its table", ".1%"),
    "formula": ("as published", ".1%"),
    "tick_ms": ("empty tick ms", ".2f"),
}
"""Figures of a row that the table shows: heading and format."""


def figures(
    cfg: Config, facts: dict, step_s: Sequence[float], cpu_s: Sequence[float], peak_bytes: int
) -> dict:
    """Return one row's figures.

    Args:
      cfg: the run, for its tokens a step and FLOPs.
      facts: other figures of the row, the kind of `device` among them.
      step_s: seconds of each step.
      cpu_s: CPU-seconds of a step, one figure for each turn; empty where another device does the work.
      peak_bytes: most memory in use; `peak_gb` counts in 1e9.
    """
    tokens = cfg.train.global_batch * cfg.data.seq_len
    median = statistics.median(step_s)
    tflops = tokens * flops_per_token(cfg.model, cfg.data.seq_len) / median / 1e12
    row = {
        **step_deciles(step_s),
        "tokens_per_s": tokens / median,
        "tflops_per_device": tflops,
        "peak_gb": peak_bytes / 1e9,
    }
    if cpu_s:
        row["tokens_per_cpu_s"] = tokens / statistics.median(cpu_s)
    share = mfu(tflops * 1e12, facts["device"], cfg.train.precision)
    if share is not None:
        row["mfu"] = share
    return row | facts


def step_deciles(step_s: Sequence[float]) -> dict:
    """Return `num_steps`, and `step_s`: the median, p10 and p90 of the steps."""
    deciles = (
        statistics.quantiles(step_s, n=10, method="inclusive") if len(step_s) > 1 else [*step_s] * 9
    )
    middle = statistics.median(step_s)
    return {
        "num_steps": len(step_s),
        "step_s": {"median": middle, "p10": deciles[0], "p90": deciles[-1]},
    }


class Report:
    """The rows of one benchmark, in a file."""

    def __init__(self, path: Path, suite: str, command: Sequence[str]):
        self.path = path
        self.rows: list[dict] = []
        self.goals: list[dict] = []
        self.complete = False
        self._head = {
            "suite": suite,
            "command": " ".join(command),
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": {"cores": os.cpu_count(), "system": platform.platform()},
            "versions": {"python": platform.python_version(), "ultrascale_jax": __version__}
            | {name: importlib.metadata.version(name) for name in LIBRARIES},
        }
        self.save()

    def add(self, workload: str, contestant: str, **values: object) -> dict:
        """Add a row, and return it: its status is `measured`, `skipped`, `failed`, `out of memory`, or `running`."""
        row = {"workload": workload, "contestant": contestant, "status": "measured", **values}
        self.rows.append(row)
        self.save()
        return row

    def goal(self, goal: str, value: float, met: bool) -> None:
        """Compare a figure with the project's goal."""
        self.goals.append({"goal": goal, "value": value, "met": met})
        self.save()

    def save(self) -> None:
        """Write the file atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"complete": self.complete, "results": self.rows, "goals": self.goals}
        write_atomic(self.path, (json.dumps(self._head | content, indent=2) + "\n").encode())

    def complete_by(self, work: Callable[[], None], console: Console) -> None:
        """Do `work`, which adds the rows, and print them; an interrupt ends the process and keeps the rows so far."""
        try:
            work()
            self.complete = True
        except KeyboardInterrupt:
            for row in (row for row in self.rows if row["status"] == "running"):
                row |= {"status": "skipped", "reason": "interrupted"}
        self.save()
        self.print(console)
        if not self.complete:
            raise SystemExit(128 + signal.SIGINT)

    def print(self, console: Console) -> None:
        """Print the table, then the parts that have no figures, then the goals."""
        measured = [row for row in self.rows if row["status"] == "measured"]
        used = {
            name: value
            for name, value in COLUMNS.items()
            if any(name in _flat(row) for row in measured)
        }
        table = output.table(("workload", "contestant"), [heading for heading, _ in used.values()])
        for row in measured:
            values = _flat(row)
            cells = [
                format(values[name], form) if name in values else ""
                for name, (_, form) in used.items()
            ]
            table.add_row(row["workload"], row["contestant"], *cells)
        if measured:
            console.print(table)
        for row in self.rows:
            if row["status"] != "measured":
                line = f"{row['workload']}, {row['contestant']}: {row['status']}: {row.get('reason', '')}"
                console.print(line, markup=False)
        for goal in self.goals:
            met = "met" if goal["met"] else "NOT met"
            console.print(f"{goal['goal']}: {goal['value']:.4g}, {met}", markup=False)
        console.print(f"written to {self.path}", markup=False)


def _flat(row: dict) -> dict:
    """Return a row with its step time as one cell."""
    if "step_s" not in row:
        return row
    median, p10, p90 = (1e3 * row["step_s"][name] for name in ("median", "p10", "p90"))
    form = ",.1f" if median >= 10 else ".3f"
    return row | {"step_ms": f"{median:{form}} ({p10:{form}}-{p90:{form}})"}
