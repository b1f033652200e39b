"""Figures of `validate --json`: cells as lines, predictions as clouds."""

import json

import pytest

from scripts.plan import VERBS
from scripts.validation import figures
from ultrascale_jax.cli import plan
from ultrascale_jax.config import UserError
from ultrascale_jax.plan.report import files

VALIDATE = {
    "verb": "validate",
    "rows": 3,
    "ran": 2,
    "half": "test",
    "cells": [
        {
            "model": "1B",
            "nodes": nodes,
            "rows": 1,
            "spearman": 0.91,
            "first_choice": 0.972,
            "speed_error": 0.0625,
            "memory_error": None,
        }
        for nodes in (1, 2)
    ],
    "predictions": [
        {
            "model": "1B",
            "nodes": 1,
            "label": f"dp{gpus}",
            "tokens_per_s_gpu": 41234.0,
            "memory_gib": 33.25,
            "measured_tokens_per_s_gpu": speed,
            "measured_memory_gib": memory,
        }
        for gpus, speed, memory in ((8, 40150.0, 36.7), (16, None, None))
    ],
}


def sources(tmp_path, content):
    (tmp_path / "a.json").write_text(json.dumps(content))
    return [files.read(str(tmp_path / "a.json"), {"validate": figures.figures})]


def test_cells_and_predictions_become_figures(tmp_path):
    cells, predictions = figures.figures(sources(tmp_path, VALIDATE))
    assert (cells.name, predictions.name) == ("validation", "predictions")
    assert ("first choice / best (%)", "1B", 2, 97.2, "1 runs") in cells.table().rows
    shown = {row[0]: row[2:4] for row in predictions.table().rows}
    assert shown == {"memory": (36.7, 33.25), "throughput": (40150.0, 41234.0)}


def test_a_field_that_is_missing_is_named(tmp_path):
    lacking = sources(tmp_path, {"verb": "validate", "cells": []})
    with pytest.raises(UserError, match="lacks the field 'rows'"):
        files.figures(lacking, {"validate": figures.figures})


@pytest.mark.slow
def test_report_draws_them(tmp_path, capsys):
    (tmp_path / "v.json").write_text(json.dumps(VALIDATE))
    plan.main(["report", str(tmp_path / "v.json"), "--out", str(tmp_path), "--json"], VERBS)
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["files"]) == 3
    text = (tmp_path / "report.html").read_text()
    assert "41,234" in text and "36.7" in text and "97.2" in text
