"""Figures of what `python -m scripts.plan validate --json` wrote: predictions beside measurements."""

from collections.abc import Sequence
from typing import Any

from ultrascale_jax.figures.charts import Cloud, Clouds, Lines, Point
from ultrascale_jax.figures.figure import Figure
from ultrascale_jax.plan.report.files import Source

CELLS = (
    ("rank correlation", "spearman", 1),
    ("first choice / best (%)", "first_choice", 100),
    ("throughput error (%)", "speed_error", 100),
    ("memory error (%)", "memory_error", 100),
)
"""Of one model and number of nodes in `validate`: title, key, factor."""


def figures(sources: Sequence[Source]) -> list[Figure]:
    found: list[Figure] = []
    for n, source in enumerate(sources):
        content, tail = source.content, f"_{n + 1}" if len(sources) > 1 else ""
        if content.get("kind") == "published":
            caption = "published by others, predicted as this project's trainer"
            found.append(_predictions(content["rows"], f"published{tail}", caption, "software"))
            continue
        panels = {
            title: {
                model: [
                    Point(x=cell["nodes"], y=scale * cell[key], note=f"{cell['rows']} runs")
                    for cell in content["cells"]
                    if cell["model"] == model and cell[key] is not None
                ]
                for model in dict.fromkeys(cell["model"] for cell in content["cells"])
            }
            for title, key, scale in CELLS
        }
        rows = f"{content['rows']:,} configurations ({content['half']}), {content['ran']:,} of them ran"
        found.append(
            Lines(
                name=f"validation{tail}",
                title="Prediction against measurement, by model and number of nodes",
                caption=f"{rows}. Rank correlation (Spearman) of throughput; measured throughput of the first choice "
                "over the best measured; median errors.",
                panels=panels,
                x="nodes",
                y="",
                scale="none",
            )
        )
        if content.get("predictions"):
            found.append(_predictions(content["predictions"], f"predictions{tail}", rows))
    return found


def _predictions(
    rows: Sequence[dict[str, Any]], name: str, caption: str, group: str = "model"
) -> Figure:
    panels: dict[str, Cloud] = {}
    for title, key, unit in (
        ("memory", "memory_gib", "GiB"),
        ("throughput", "tokens_per_s_gpu", "tokens/s/GPU"),
    ):
        groups: dict[str, list[Point]] = {}
        for row in rows:
            if row[f"measured_{key}"] is not None:
                point = Point(x=row[f"measured_{key}"], y=row[key], note=row["label"])
                groups.setdefault(row[group], []).append(point)
        x, y = f"measured ({unit})", f"predicted ({unit})"
        panels[title] = Cloud(x=x, y=y, groups=groups, equal=True)
    return Clouds(
        name=name,
        title="Memory and throughput, predicted and measured",
        caption=f"One point for each run: {caption}.",
        panels=panels,
    )
