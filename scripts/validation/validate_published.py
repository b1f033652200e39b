"""Published runs beside the estimate for this project's trainer, for `python -m scripts.plan validate`."""

import dataclasses
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scripts.validation import published
from scripts.validation.published import Prediction, Row, Summary
from ultrascale_jax.plan.prediction import SCHEMA

COMPARED = (
    "Compared is the estimate for this project's trainer (software ULTRASCALE), not for theirs."
)


def show(rows: Iterable[Row], as_json: bool) -> None:
    """Prints the comparison: tables, or one JSON object."""
    predictions = [published.predict(row) for row in rows]
    found = published.summaries(predictions)
    if as_json:
        result = {
            "verb": "validate",
            "schema": SCHEMA,
            "kind": "published",
            "rows": [_row(one) for one in predictions],
            "summary": [dataclasses.asdict(summary) for summary in found],
        }
        print(json.dumps(result))
        return
    console = Console() if sys.stdout.isatty() else Console(width=150)
    sources = list(dict.fromkeys(one.row.source for one in predictions))
    console.print(_runs(predictions, sources))
    for n, source in enumerate(sources, start=1):
        console.print(f"source {n}: {source}", markup=False, soft_wrap=True)
    console.print(_summary(found))
    ratios = [one.ratio for one in predictions]
    console.print(
        f"{len(ratios)} runs: median predicted / measured {statistics.median(ratios):.2f}, "
        f"median |log| {published.median_error(ratios):.2f}",
        soft_wrap=True,
    )
    console.print(COMPARED, soft_wrap=True)


def _row(one: Prediction) -> dict[str, Any]:
    """One run; GiB of one GPU; what was not measured is null."""
    row = one.row
    return {
        "source": row.source,
        "software": row.software,
        "model": row.model,
        "precision": row.run.precision,
        "gpus": row.run.num_gpus,
        "mesh": {axis: size for axis, size in row.run.mesh.sizes.items() if size > 1},
        "label": row.run.label,
        "tokens_per_s_gpu": one.tokens_per_s_gpu,
        "memory_gib": one.memory_gib,
        "measured_tokens_per_s_gpu": row.tokens_per_s_gpu,
        "measured_memory_gib": row.memory_gib,
        "ratio": one.ratio,
        "assumed": row.assumed,
    }


def _runs(predictions: Iterable[Prediction], sources: Sequence[str]) -> Table:
    """One line for the runs of one source, software, model and precision; sources by their place from 1."""
    groups: dict[tuple[str, str, str, str], list[Prediction]] = {}
    for one in predictions:
        row = one.row
        key = (str(sources.index(row.source) + 1), row.software, row.model, row.run.precision)
        groups.setdefault(key, []).append(one)
    numbers = ("measured", "predicted", "predicted / measured")
    table = Table("source", "software", "model", "precision", "GPUs", "first mesh", *numbers)
    table.title = "tokens/s/GPU of published runs"
    for column in (table.columns[4], *table.columns[6:]):
        column.justify = "right"
    for key, group in groups.items():
        first = group[0].row.run
        table.add_row(
            *map(escape, key),
            _span([one.row.run.num_gpus for one in group], "{}"),
            first.mesh.text if first.num_gpus > 1 else "1 GPU",
            _span([one.row.tokens_per_s_gpu for one in group], "{:,.0f}"),
            _span([one.tokens_per_s_gpu for one in group], "{:,.0f}"),
            _span([one.ratio for one in group], "{:.2f}"),
        )
    return table


def _span(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low}-{high}"


def _summary(found: Iterable[Summary]) -> Table:
    numbers = ("rows", "median predicted / measured", "median |log|", "worst")
    table = Table("software", "", "precision", *numbers)
    for column in table.columns[3:]:
        column.justify = "right"
    for one in found:
        table.add_row(
            escape(one.software),
            "pipeline" if one.pipeline else "no pipeline",
            one.precision,
            str(one.rows),
            f"{one.median_ratio:.2f}",
            f"{one.median_error:.2f}",
            f"{one.worst_ratio:.2f}",
        )
    return table
