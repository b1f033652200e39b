"""Published runs of other trainers as an outside check: no constant of the planner was fitted to them."""

import csv
from pathlib import Path

import pytest

from scripts.validation.published import Published, read

FILE = Path(__file__).parents[3] / "docs/planning/published_runs.csv"


@pytest.fixture(scope="module")
def rows() -> list[Published]:
    return read(FILE)


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
