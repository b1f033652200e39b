"""Published runs of other trainers as an outside check: no constant of the planner was fitted to them."""

import csv
import math
import statistics
from pathlib import Path

import pytest

from scripts.validation.published import Published, read

FILE = Path(__file__).parents[3] / "docs/planning/published_runs.csv"


@pytest.fixture(scope="module")
def rows() -> list[Published]:
    return read(FILE)


def ratios(rows: list[Published], software: str, precision: str) -> list[float]:
    return [
        row.ratio for row in rows if row.software == software and row.run.precision == precision
    ]


def test_every_line_is_read_as_it_stands(rows):
    with FILE.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(rows) == len(lines) == 149
    for row, line in zip(rows, lines, strict=True):
        assert row.run.num_gpus == row.cluster.num_gpus == int(line["gpus"])
        assert row.tokens_per_s_gpu == float(line["tok_s_gpu"])
    first = rows[0]
    assert first.software == "torchtitan"
    assert (first.run.mesh.fsdp, first.run.sequences, first.run.zero) == (8, 2, 3)
    assert first.run.shape.num_params == pytest.approx(8.03e9, rel=1e-3)
    assert first.cluster.name == "grand-teton"


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_maxtext_which_is_jax_too_is_predicted_within_a_fifth(rows, precision):
    found = ratios(rows, "MaxText", precision)
    assert len(found) >= 10
    assert statistics.median(abs(math.log(r)) for r in found) < math.log(1.15)
    assert max(abs(math.log(r)) for r in found) < math.log(1.2)
