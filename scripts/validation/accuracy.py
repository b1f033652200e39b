"""Write docs/accuracy.md: `python -m scripts.validation.accuracy`.

Every number comes from a CSV: docs/planning/NAME.csv (formulas and XLA), tests/data/plan/playbook_runs.csv (the half
of the playbook's runs on which no constant was fitted) and docs/planning/published_runs.csv. Held-out rows come first.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from scripts.validation import playbook, published
from scripts.validation.xla_tables import Row, markdown, read

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

`python -m scripts.validation.accuracy` writes this page from the files that it names, and a test compares the two.
[How the planner knows](explanation/how_the_planner_knows.md) explains the methods. No step of this trainer has been
timed on a GPU: measured times on this page are those of other trainers.

## Memory: formulas against XLA's buffer assignment

A row of `docs/planning/NAME.csv` is a training step that XLA compiled for H100s
(`python -m scripts.validation.xla_tables NAME --out FILE`). A row is *held out* if no term of the formulas was
derived from it; the authors saw it while they wrote them. The formulas have no fitted coefficient. The
error is the distance of formula / XLA from 1, for the peak of one GPU.

{memory}

## Step time: formulas against the simulated program

Seconds of a step by formula, over the seconds that the simulation of XLA's schedule gives. `memory_xla.csv` has no
times.

{time}

## Choice of a mesh: the playbook's measured runs

The authors of the playbook measured nanotron on 8 to 512 H100s. The planner predicts these runs with nanotron's
settings; its constants of time were fitted on one half of the rows, and the table is about the other half:
{configurations} configurations, {ran} of which ran
(`python -m scripts.validation.playbook tests/data/plan/playbook_runs.csv`). A *cell* is one model on one number of
nodes. The *first choice* is the fastest by prediction of those that are predicted to fit; its measured throughput
is divided by the best measured one.

{totals}

The cells whose first choice reaches less than 90% of the best: {worst}. There rows of one family differ by two to
fifteen times, and no column of the file shows a cause.

## Speed: published runs of others

Tokens per second that the formulas predict for *this* trainer, over those that others measured with theirs, on the
same model, mesh and machine (`python -m scripts.validation.published docs/planning/published_runs.csv`). Below 1
the other trainer was measured faster than this one is predicted to be. No constant was fitted to these runs. Groups
of fewer than {least} runs are left out.

{published}

All {runs} runs: median {ratio}, worst group {group}. So a predicted time ranks meshes and estimates days and cost;
it is no promise.
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
    rows = [row for row in playbook.read(RUNS)[0] if not row.calibration]
    predictions = [playbook.predict(row) for row in rows]
    cells = playbook.cells(predictions)
    worst = sorted(
        (cell.first_choice, f"{cell.model} on {cell.nodes} nodes {cell.first_choice:.0%}")
        for cell in cells
        if cell.first_choice is not None and cell.first_choice < 0.9
    )
    return {
        "configurations": str(len(predictions)),
        "ran": str(sum(cell.rows for cell in cells)),
        "totals": markdown(("", "found", "goal"), playbook.totals(predictions, cells)),
        "worst": ", ".join(text for _, text in worst),
    }


def published_tables() -> dict[str, str]:
    """Predict the published runs; return the parts of `TEXT` about them."""
    rows = published.read(ROOT / "docs/planning/published_runs.csv")
    predictions = [published.predict(row) for row in rows]
    groups = [one for one in published.summaries(predictions) if one.rows >= LEAST]
    groups.sort(key=lambda one: (one.precision, one.software))
    lines = [
        (
            *(one.software, one.gpu, "pipeline" if one.pipeline else "no pipeline", one.precision),
            *(one.rows, f"{one.median_ratio:.2f}", f"{one.worst_ratio:.2f}"),
        )
        for one in groups
    ]
    columns = ("trainer", "GPU", "", "precision", "runs", "median predicted / measured", "worst")
    return {
        "published": markdown(columns, lines),
        "runs": str(len(predictions)),
        "ratio": f"{statistics.median(one.ratio for one in predictions):.2f}",
        "group": _worst_group(groups),
    }


def _worst_group(groups: Sequence[published.Summary]) -> str:
    worst = max(groups, key=lambda one: one.median_error)
    return f"{worst.software} in {worst.precision} ({worst.median_ratio:.2f})"


def _rows(name: str) -> list[Row]:
    return read(ROOT / f"docs/planning/{name}.csv")


def page() -> str:
    """Return the text of docs/accuracy.md."""
    tables = {"memory": memory_table(), "time": time_table(), "least": str(LEAST)}
    return TEXT.format(**tables, **playbook_tables(), **published_tables())


if __name__ == "__main__":
    PAGE.write_text(page())
