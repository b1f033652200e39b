"""Write docs/accuracy.md: `python -m scripts.validation.accuracy`.

Every number comes from a CSV: docs/planning/NAME.csv (formulas and XLA), tests/data/plan/playbook_runs.csv (the half
of the playbook's runs on which no constant was fitted) and docs/planning/published_runs.csv. Held-out rows come first.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from scripts.validation import playbook, published
from scripts.validation.xla_tables import Row, read

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/accuracy.md"
RUNS = ROOT / "tests/data/plan/playbook_runs.csv"
FILES = {
    "memory_xla": "dense models, no pipeline",
    "pipelines": "pipelines",
    "context": "32,768 to 1,048,576 tokens over `cp`",
    "experts": "experts",
}
LEAST = 4
"""A group of fewer published runs is left out."""

TEXT = """\
# How accurate the planner is

`python -m scripts.validation.accuracy` writes this page from the files that it names.
[How the planner knows](explanation/how_the_planner_knows.md) explains the methods. No step of this trainer has been
timed on a GPU: measured times are those of other trainers.

## Memory: formulas against XLA's buffer assignment

A row of `docs/planning/NAME.csv` is a training step that XLA compiled for H100s
(`python -m scripts.validation.xla_tables NAME`). A row is *held out* if no term of the formulas was
derived from it; the authors saw it while they wrote them. The error is the distance of
formula / XLA from 1, for the peak of one GPU.

{memory}

## Step time: formulas against the simulated program

Seconds of a step by formula, over those that the simulation of XLA's schedule gives.

{time}

## Choice of a mesh: the playbook's measured runs

The authors of the playbook measured nanotron on 8 to 512 H100s. {{src}}`scripts/validation/nanotron.py`, whose
constants were fitted on one half of the rows, predicts the other half: {configurations} configurations of
`tests/data/plan/playbook_runs.csv`, {ran} of which ran. A *cell* is one model on one number of nodes. The *first
choice* is the fastest by prediction of those that are predicted to fit; its measured throughput is divided by the
best measured one.

{totals}

The cells whose first choice reaches less than 90% of the best: {worst}. There rows of one family differ by two to
fifteen times, and no column of the file shows a cause.

## Speed: published runs of others

Tokens per second that the formulas predict for *this* trainer, over those that others measured with theirs, on the
same model, mesh and machine ([published_runs.csv](planning/published_runs.csv)); below 1 theirs was faster. No
constant was fitted to these runs. Groups of fewer than {least} runs are left out.

{published}

All {runs} runs: median {ratio}, worst group {group}.

### Held out

The same for [29 runs](planning/held_out_runs.csv) published later; *before* is the prediction of commit `b57b119e`,
before any rate was fitted to published runs.

{held_out}
"""


def memory_table() -> str:
    """Format the errors of memory, held-out rows first."""
    lines: list[tuple[object, ...]] = []
    for kind_of_row, label in (("held", "held out"), ("-", "derived from")):
        for name, kind in FILES.items():
            errors = [
                abs(float(row["error_pct"])) for row in _rows(name) if row["held"] == kind_of_row
            ]
            median, worst = statistics.median(errors), max(errors)
            link = f"[{name}](planning/{name}.csv)"
            lines.append((label, link, kind, len(errors), f"{median:.1f}%", f"{worst:.1f}%"))
    return markdown(("rows", "file", "", "runs", "median error", "worst"), lines)


def time_table() -> str:
    """Format the ratio of the formulas' times to the simulated ones."""
    lines: list[tuple[object, ...]] = []
    for name in ("pipelines", "context", "experts"):
        ratios = [float(row["formula_step_s"]) / float(row["step_s"]) for row in _rows(name)]
        span = f"{min(ratios):.2f} to {max(ratios):.2f}"
        lines.append((name, len(ratios), f"{statistics.median(ratios):.2f}", span))
    return markdown(("file", "runs", "median ratio", "range"), lines)


def playbook_tables() -> dict[str, str]:
    """Predict the held-out half of the playbook's runs; return the parts of `TEXT` about them."""
    predictions = [playbook.predict(row) for row in playbook.read(RUNS) if not row.calibration]
    cells = playbook.cells(predictions)
    cells.sort(key=lambda cell: cell.first_choice)
    worst = [
        f"{cell.model} on {cell.nodes} nodes {cell.first_choice:.0%}"
        for cell in cells
        if cell.first_choice < 0.9
    ]
    return {
        "configurations": str(len(predictions)),
        "ran": str(sum(cell.rows for cell in cells)),
        "totals": markdown(("", "found", "goal"), playbook.totals(predictions, cells)),
        "worst": ", ".join(worst),
    }


def published_tables() -> dict[str, str]:
    """Predict the published runs; return the parts of `TEXT` about them."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for one in published.read(ROOT / "docs/planning/published_runs.csv"):
        pipeline = "pipeline" if one.run.mesh.pp > 1 else "no pipeline"
        experts = "experts" if one.run.shape.experts else ""
        key = (one.run.precision, one.software, one.cluster.gpu.name, experts, pipeline)
        groups.setdefault(key, []).append(one.ratio)
    lines, largest = [], (0.0, "")
    for (precision, software, gpu, _, pipeline), ratios in sorted(groups.items()):
        if len(ratios) < LEAST:
            continue
        median, worst = statistics.median(ratios), max(ratios, key=distance)
        figures = len(ratios), f"{median:.2f}", f"{worst:.2f}"
        lines.append((software, gpu, pipeline, precision, *figures))
        error = statistics.median(map(distance, ratios))
        largest = max(largest, (error, f"{software} in {precision} ({median:.2f})"))
    ratios = [ratio for group in groups.values() for ratio in group]
    columns = ("trainer", "GPU", "", "precision", "runs", "median predicted / measured", "worst")
    return {
        "published": markdown(columns, lines),
        "runs": str(len(ratios)),
        "ratio": f"{statistics.median(ratios):.2f}",
        "group": largest[1],
    }


def held_out_table() -> str:
    """Predict the runs that were predicted before the rates changed."""
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for one in published.read(ROOT / "docs/planning/held_out_runs.csv"):
        experts = "experts" if one.run.shape.experts else "dense"
        ratios = one.before / one.tokens_per_s_gpu, one.ratio
        groups.setdefault((one.software, experts, one.run.precision), []).append(ratios)
    lines = [
        (
            *key,
            len(ratios),
            *(f"{statistics.median(column):.2f}" for column in zip(*ratios, strict=True)),
        )
        for key, ratios in groups.items()
    ]
    return markdown(("trainer", "", "precision", "runs", "before", "now"), lines)


def distance(ratio: float) -> float:
    """Return how far a ratio is from 1, on a logarithmic scale."""
    return abs(math.log(ratio))


def markdown(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Format a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def _rows(name: str) -> list[Row]:
    return read(ROOT / f"docs/planning/{name}.csv")


def page() -> str:
    """Return the text of docs/accuracy.md."""
    tables = {"memory": memory_table(), "time": time_table(), "least": str(LEAST)}
    tables |= {"held_out": held_out_table()}
    return TEXT.format(**tables, **playbook_tables(), **published_tables())


if __name__ == "__main__":
    PAGE.write_text(page())
