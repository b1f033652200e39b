"""The formulas beside the playbook's runs: reading, comparing, fitting, and how well they do."""

import dataclasses
import statistics
from pathlib import Path

import pytest

from scripts.validation.playbook import Prediction, cells, read, totals
from ultrascale_jax.plan.formulas.memory import breakdown

RUNS = Path(__file__).parents[2] / "data" / "plan" / "playbook_runs.csv"


@pytest.fixture(scope="module")
def rows():
    return read(RUNS)


def test_every_consistent_configuration_is_read_once(rows):
    # 1,643 rows; 20 contradict themselves, 12 repeat another one.
    assert len(rows) == len({row.run for row in rows}) == 1611
    assert 0.45 < sum(row.calibration for row in rows) / len(rows) < 0.55


def test_half_of_the_runs_without_a_pipeline_are_within_a_tenth_of_their_memory(rows):
    """Chapter 1 of the course says so of the planner's page, which has the same formulas."""
    some = [row for row in rows if row.memory_gib and row.run.mesh.pp == 1 and row.run.mesh.sp <= 8]
    said = [breakdown(dataclasses.replace(row.run, remat="none")).peak_bytes for row in some]
    measured = [row.memory_gib * 2**30 for row in some]
    errors = [abs(a / b - 1) for a, b in zip(said, measured, strict=True)]
    assert len(errors) > 160 and statistics.median(errors) < 0.1
    assert statistics.correlation(said, measured, method="ranked") > 0.95


def test_a_cell_compares_order_and_first_choice_and_the_totals_memory_and_fit(rows):
    four = [row for row in rows if (row.model, row.cluster.nodes) == ("1B", 1) and row.memory_gib][
        :4
    ]
    speeds = [100.0, 400.0, 300.0, 200.0]
    measured = [
        dataclasses.replace(row, tokens_per_s_gpu=speed, memory_gib=50.0)
        for row, speed in zip(four, speeds, strict=True)
    ]
    guesses = [(150.0, True), (450.0, False), (250.0, True), (350.0, True)]
    predictions = [
        Prediction(row=row, tokens_per_s_gpu=g, memory_gib=55.0, fits=fits, impossible=False)
        for row, (g, fits) in zip(measured, guesses, strict=True)
    ]
    (cell,) = cells(predictions)
    assert (cell.model, cell.nodes, cell.rows) == ("1B", 1, 4)
    assert cell.spearman == pytest.approx(0.8)
    # The fastest by prediction does not fit; the next one was measured at 200 of 400.
    assert cell.first_choice == pytest.approx(0.5)
    by_name = {name: found for name, found, _ in totals(predictions, [cell])}
    assert by_name["memory, median error"] == "10.0%"
    assert by_name["fits or not, right"] == "75.0%"
