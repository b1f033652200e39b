"""Write the tables of docs/accuracy.md: `python -m scripts.validation.accuracy`.

Every number comes from a CSV: docs/planning/NAME.csv (formulas, XLA and measurements of others) and
tests/data/plan/playbook_runs.csv (the half of the playbook's runs on which no constant was fitted).
"""

import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from scripts.validation import playbook, published
from scripts.validation.xla_tables import Row, config, read
from ultrascale_jax.plan.formulas import costs
from ultrascale_jax.plan.hardware import find_gpu
from ultrascale_jax.plan.workload import Run

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


def memory_table() -> str:
    """Format the errors of memory of the held-out rows."""
    lines: list[tuple[object, ...]] = []
    for name, kind in FILES.items():
        errors = [abs(float(row["error_pct"])) for row in _rows(name) if row["held"] == "held"]
        figures = f"{statistics.median(errors):.1f}%", f"{max(errors):.1f}%"
        lines.append((f"[{name}](planning/{name}.csv)", kind, len(errors), *figures))
    return markdown(("file", "", "held-out runs", "median error", "worst"), lines)


def time_table() -> str:
    """Format the ratio of the formulas' times to the simulated ones."""
    lines: list[tuple[object, ...]] = []
    for name in ("pipelines", "context", "experts"):
        ratios = [float(row["formula_step_s"]) / float(row["step_s"]) for row in _rows(name)]
        lines.append((name, len(ratios), spread(ratios)))
    return markdown(("file", "runs", "formula / simulation"), lines)


def playbook_table() -> str:
    """Predict the held-out half of the playbook's runs."""
    predictions = [playbook.predict(row) for row in playbook.read(RUNS) if not row.calibration]
    cells = playbook.cells(predictions)
    ran = sum(cell.rows for cell in cells)
    lines = [("configurations, of which ran", f"{len(predictions)}, {ran}", "")]
    return markdown(("", "found", "goal"), [*lines, *playbook.totals(predictions, cells)])


def published_table() -> str:
    """Predict the published runs; held-out runs come last."""
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for name in ("published", "held_out"):
        for one in published.read(ROOT / f"docs/planning/{name}_runs.csv"):
            if not one.cluster.gpu.name.startswith("h100"):
                continue
            kind = "pipeline" if one.run.mesh.pp > 1 else "no pipeline"
            kind = "held out" if name == "held_out" else kind
            kind += ", experts" if one.run.shape.experts else ""
            key = name, one.software, kind, one.run.precision
            groups.setdefault(key, []).append(one.ratios)
    lines = [
        (*kind, len(pairs), *map(spread, zip(*pairs, strict=True)))
        for (name, *kind), pairs in sorted(groups.items(), reverse=True)
        if len(pairs) >= LEAST or name == "held_out"
    ]
    return markdown(
        ("trainer", "", "precision", "runs", "before the refit", "predicted / measured"), lines
    )


def rates_table() -> str:
    """Compare the rates of single operations with measurements."""
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in _rows("rates"):
        measured = float(row["tflops"])
        figures = measured, tflops(row) / measured
        groups.setdefault((row["operation"], row["dtype"]), []).append(figures)
    lines = []
    for key, pairs in groups.items():
        measured, ratios = zip(*pairs, strict=True)
        span = f"{min(measured):,.0f} to {max(measured):,.0f}"
        lines.append((*key, len(measured), span, spread(ratios)))
    columns = ("operation", "", "measured", "TFLOP/s alone", "in a step / measured")
    return markdown(columns, lines)


def tflops(row: Row) -> float:
    """Return the TFLOP/s that the formulas give a measured operation within a step."""
    gpu = find_gpu(row["gpu"])
    if row["operation"] == "product":
        m, n, k = (float(row[name]) for name in "mnk")
        return 2 * m * n * k / costs.gemm_seconds(gpu, m, n, k, row["dtype"]) / 1e12
    backward, head_dim = "backward" in row["operation"], int(row["head_dim"])
    return 1 / costs.attention_seconds(gpu, 1e12, backward=backward, head_dim=head_dim)


def peers_table() -> str:
    """Compare the configuration of each other trainer with ours, by one simulator."""
    lines, rows = [], _rows("peers")
    for theirs, ours in zip(rows[::2], rows[1::2], strict=True):
        cells = [
            theirs["run"],
            f"{theirs['trainer']}: {theirs['mesh']}",
            f"{int(theirs['tok_s_gpu']):,}",
        ]
        for row in (theirs, ours):
            run = Run.of(*config(row))
            cells.append(f"{run.step_tokens / run.num_gpus / float(row['step_s']):,.0f}")
        lines.append(cells)
    return markdown(("run", "trainer: mesh", "measured", "simulated", "ours"), lines)


def spread(ratios: Sequence[float]) -> str:
    """Format the median of ratios and, of several, their range."""
    middle = f"{statistics.median(ratios):.2f}"
    return middle if len(ratios) < 3 else f"{middle} ({min(ratios):.2f}-{max(ratios):.2f})"


def markdown(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Format a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def _rows(name: str) -> list[Row]:
    return read(ROOT / f"docs/planning/{name}.csv")


TABLES = {
    "memory": memory_table,
    "time": time_table,
    "playbook": playbook_table,
    "published": published_table,
    "rates": rates_table,
    "peers": peers_table,
}
"""Each is on the page after the line `<!-- NAME -->`."""


def page() -> str:
    """Return the text of docs/accuracy.md, with all tables made anew."""
    text = PAGE.read_text()
    for name, table in TABLES.items():
        text = re.sub(rf"(<!-- {name} -->\n)(\|.*\n)*", rf"\g<1>{table()}\n", text)
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
