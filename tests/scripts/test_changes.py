"""The recorded steps of what each change brought; no test compiles a program of an old commit."""

import shlex
from pathlib import Path

from scripts.validation import changes
from scripts.validation.xla_tables import read
from ultrascale_jax.cli.plan_commands import common, compile

BENCHMARKS = Path(__file__).parents[2] / "docs/benchmarks"


def test_the_page_shows_every_recorded_step():
    rows = read(changes.FILE)
    assert all(float(row["step_ms"]) > 0 and float(row["gib"]) > 0 for row in rows)
    page = (BENCHMARKS / "h100_compiled.md").read_text()
    assert changes.table(rows) in page and "(changes.png)" in page
    for row in rows:
        common.parse(shlex.split(row["options"]), "compile", compile.Options, "")


def test_rows_with_figures_are_kept_and_the_figure_shows_what_each_took_off(tmp_path, monkeypatch):
    base = {"run": "8B", "options": "llama3_8b --mesh fsdp=8"}
    runs = [
        base | {"change": name, "commit": name, "gib": "", "step_ms": ""}
        for name in ("a", "b", "c")
    ]
    times = {"a": "2000", "b": "1500", "c": "1600"}
    measured = []

    def measure(row):
        measured.append(row["commit"])
        return row | {"gib": "1.0", "step_ms": times[row["commit"]]}

    monkeypatch.setattr(changes, "measure", measure)
    changes.fill(tmp_path / "a.csv", runs[:1])
    rows = changes.fill(tmp_path / "a.csv", runs)
    assert measured == ["a", "b", "c"] and read(tmp_path / "a.csv") == rows
    first, faster, slower = changes.figure(rows).panels["8B"]
    assert (first.parts[changes.AFTER], first.parts[changes.REMOVED]) == (100, 0)
    assert (faster.parts[changes.AFTER], faster.parts[changes.REMOVED]) == (75, 25)
    assert (slower.parts[changes.AFTER], slower.parts[changes.REMOVED], slower.text) == (
        80,
        0,
        "1,600",
    )
    assert "| b | b | 1,500 | -25.0% |" in changes.table(rows)
