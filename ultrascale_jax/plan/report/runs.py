"""Figures of measured or predicted runs: the columns of `tests/data/plan/playbook_runs.csv`."""

import csv
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ultrascale_jax.config import UserError, require
from ultrascale_jax.figures.charts import Cell, Cloud, Clouds, Heat, Lines, Point
from ultrascale_jax.figures.figure import Figure

COLUMNS = ("model", "nodes", "mbs", "gas", "dp", "pp", "tp", "zero", "tok_s_gpu", "mem_gb")
"""Columns that a CSV of runs must have; of the others `mesh` and `remat` are shown."""
FAMILIES = {
    (False, False): "dp",
    (True, False): "dp and tp",
    (False, True): "dp and pp",
    (True, True): "dp, tp and pp",
}


def read(path: str, text: str) -> list[dict[str, Any]]:
    """Read the rows of the CSV file `path` that holds `text`.

    Raises:
      UserError: a column is missing, or a value is no number.
    """
    try:
        lines = list(csv.DictReader(text.splitlines()))
    except csv.Error as error:
        raise UserError(f"file={path!r}: is not a CSV file: {error}") from None
    _require_columns(path, lines[0] if lines else text.splitlines()[0].split(","))
    require(lines != [], "file", path, "has no rows")
    return [_row(f"file={path!r}: line {n}", line) for n, line in enumerate(lines, 2)]


def _require_columns(path: str, head: Iterable[str]) -> None:
    missing = ", ".join(sorted(set(COLUMNS) - set(head), key=COLUMNS.index))
    require(not missing, "file", path, f"lacks the column(s) {missing}")


def _row(where: str, line: dict[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {name: line.get(name) or "" for name in ("model", "mesh", "remat")}
    for column in COLUMNS[1:]:
        kind = float if column in ("tok_s_gpu", "mem_gb") else int
        try:
            row[column] = kind(line[column] or "nan")
        except (TypeError, ValueError):
            fix = f"must be {'a number' if kind is float else 'a whole number'}"
            raise UserError(f"{where}: {column}={line[column]!r}: {fix}") from None
        least = 1 if column in COLUMNS[1:7] else 0
        require(
            not row[column] < least, f"{where}: {column}", row[column], f"must be at least {least}"
        )
    sizes = [int(size) for size in re.findall(r"=(\d+)", row["mesh"])]
    row["gpus"] = math.prod(sizes) if sizes else row["dp"] * row["tp"] * row["pp"]
    return row


def figures(rows: Sequence[dict[str, Any]], paths: str) -> list[Figure]:
    """Draw figures of the runs in the files `paths`."""
    done = [row for row in rows if math.isfinite(row["tok_s_gpu"])]
    require(done != [], "file", paths, "no row has a throughput in tok_s_gpu")
    lost = len(rows) - len(done)
    note = f"{len(done):,} runs of {paths}; {lost:,} more crashed or ran out of memory."
    models = list(dict.fromkeys(row["model"] for row in done))
    makers = (_best, _families, _sizes, _explorer)
    return [figure for make in makers if (figure := make(done, models, note))]


def _fastest[K](rows: Iterable[dict[str, Any]], key: Callable[[dict[str, Any]], K]) -> dict[K, Any]:
    """Return the fastest of the rows with the same key; in the order of the keys."""
    best: dict[Any, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["tok_s_gpu"]):
        best[key(row)] = row
    return dict(sorted(best.items()))


def _points(best: dict[int, dict[str, Any]]) -> list[Point]:
    return [Point(x=x, y=row["tok_s_gpu"], note=settings(row, " ")) for x, row in best.items()]


def _best(rows: Sequence[dict[str, Any]], models: Sequence[str], note: str) -> Figure:
    best = _fastest(rows, lambda row: (row["model"], str(row["nodes"])))
    cells = {place: Cell(value=row["tok_s_gpu"], text=settings(row)) for place, row in best.items()}
    return Heat(
        name="best",
        title="Fastest configuration by model and number of nodes",
        caption=f"Tokens/s/GPU of the fastest run of each model and number of nodes. {note}",
        rows=tuple(models),
        columns=tuple(str(n) for n in sorted({row["nodes"] for row in rows})),
        cells=cells,
        unit="tokens/s/GPU",
        x="nodes",
        absent="no run",
    )


def settings(row: dict[str, Any], separator: str = "\n") -> str:
    """Return a run in three short lines: mesh, batch, ZeRO and memory."""
    axes = [f"{axis}{row[axis]}" for axis in ("dp", "tp", "pp") if row[axis] > 1]
    mesh = row["mesh"].replace("=", "").replace(",", " ") or " ".join(axes) or "1 GPU"
    batch = f"mbs{row['mbs']} gas{row['gas']} z{row['zero']} {row['remat']}".rstrip()
    memory = f"{row['mem_gb']:.1f} GiB" if math.isfinite(row["mem_gb"]) else ""
    return separator.join(filter(None, (mesh, batch, memory)))


def _families(rows: Sequence[dict[str, Any]], models: Sequence[str], note: str) -> Figure:
    panels: dict[str, dict[str, list[Point]]] = {}
    for model in models:
        for axes, name in FAMILIES.items():
            mine = [r for r in rows if (r["model"], r["tp"] > 1, r["pp"] > 1) == (model, *axes)]
            if mine:
                best = _fastest(mine, lambda row: row["gpus"])
                panels.setdefault(model, {})[name] = _points(best)
    return Lines(
        name="families",
        title="Fastest run by kind of parallelism",
        caption=f"Tokens/s/GPU of the fastest run whose mesh has the named axes larger than 1. {note}",
        panels=panels,
        x="GPUs",
        y="tokens/s/GPU",
        scale="none",
    )


def _sizes(rows: Sequence[dict[str, Any]], models: Sequence[str], note: str) -> Figure | None:
    panels: dict[str, dict[str, list[Point]]] = {}
    for model in models:
        mine = [row for row in rows if row["model"] == model]
        for axis in ("dp", "tp", "pp"):
            if len({row[axis] for row in mine}) > 1:
                lines = panels.setdefault(f"{model}, {axis}", {})
                for nodes in sorted({row["nodes"] for row in mine}):
                    here = [row for row in mine if row["nodes"] == nodes]
                    lines[_nodes(nodes)] = _points(_fastest(here, operator.itemgetter(axis)))
    if not panels:
        return None
    return Lines(
        name="axis_sizes",
        title="Throughput by the size of one axis, all else chosen best",
        caption=f"Tokens/s/GPU of the fastest run with that size of the axis, a line for each number of nodes. {note}",
        panels=panels,
        x="size of the axis",
        y="tokens/s/GPU",
        scale="row",
    )


def _explorer(rows: Sequence[dict[str, Any]], models: Sequence[str], note: str) -> Figure:
    panels: dict[str, Cloud] = {}
    for model in models:
        groups: dict[str, list[Point]] = {}
        for row in sorted(rows, key=lambda row: row["nodes"]):
            if row["model"] == model and math.isfinite(row["mem_gb"]):
                point = Point(x=row["mem_gb"], y=row["tok_s_gpu"], note=settings(row, " "))
                groups.setdefault(_nodes(row["nodes"]), []).append(point)
        panels[model] = Cloud(x="memory (GiB)", y="tokens/s/GPU", groups=groups)
    return Clouds(
        name="runs",
        title="All runs: throughput over memory",
        caption=f"One point for each run. {note}",
        panels=panels,
    )


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count > 1)}"
