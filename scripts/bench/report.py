"""A benchmark's results: rows of figures, as a table and as JSON.

The JSON is written anew after every row, so a benchmark that is interrupted keeps its rows.
"""

import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ultrascale_jax.cli import output
from ultrascale_jax.launch.run_files import write_atomic

LIBRARIES = ("ultrascale_jax", "jax", "jaxlib", "flax", "optax", "numpy")

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
    "peak_gb": ("peak GB", ".2f"),
    "compile_s": ("compile s", ".1f"),
    "reason": ("fault", ""),
}
"""Figures of a row that the table shows: heading and format."""

type Row = dict[str, Any]


def step_deciles(step_s: Sequence[float]) -> Row:
    """Return `num_steps`, and `step_s`: the median, p10 and p90 of the steps."""
    deciles = statistics.quantiles(step_s, n=10, method="inclusive")
    middle = statistics.median(step_s)
    return {
        "num_steps": len(step_s),
        "step_s": {"median": middle, "p10": deciles[0], "p90": deciles[-1]},
    }


class Report:
    """The rows of one benchmark, in a file."""

    def __init__(self, path: Path, command: Sequence[str]):
        self.path, self.rows = path, []
        self._head = {
            "command": shlex.join(["python", "-m", *command]),
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": {"cores": os.cpu_count(), "system": platform.platform()},
            "versions": {"python": platform.python_version()}
            | {name: importlib.metadata.version(name) for name in LIBRARIES},
        }

    def add(self, *rows: Row) -> None:
        """Add rows, each with `workload` and `contestant`, and write the file atomically."""
        self.rows += rows
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self._head | {"results": self.rows}, indent=2)
        write_atomic(self.path, f"{text}\n".encode())

    def print(self) -> None:
        """Print the table, with the columns that some row has."""
        rows = [_flat(row) for row in self.rows]
        used = {name: cell for name, cell in COLUMNS.items() if any(name in row for row in rows)}
        table = output.table(("workload", "contestant"), [heading for heading, _ in used.values()])
        for row in rows:
            cells = [
                format(row[name], form) if name in row else "" for name, (_, form) in used.items()
            ]
            table.add_row(row["workload"], row["contestant"], *cells)
        console = output.console(190)
        console.print(table)
        console.print(f"written to {self.path}", markup=False)


def _flat(row: Row) -> Row:
    """Return a row with its step time as one cell."""
    if "step_s" not in row:
        return row
    median, p10, p90 = (1e3 * row["step_s"][name] for name in ("median", "p10", "p90"))
    form = ",.1f" if median >= 10 else ".3f"
    return row | {"step_ms": f"{median:{form}} ({p10:{form}}-{p90:{form}})"}
