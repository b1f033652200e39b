"""The table of compiled runs with experts: the formulas beside XLA, and what it says of the ways to the experts."""

from pathlib import Path
from statistics import median

import pytest

from scripts.validation import xla_tables
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster, find_gpu
from ultrascale_jax.plan.workload import Run

TABLE = Path(__file__).parents[2] / "docs" / "planning" / "experts.csv"
ROWS = xla_tables.read(TABLE)
NOW = [xla_tables.with_formula(row) for row in ROWS]
"""The rows with what the formulas say today."""
WAYS = xla_tables.ways(ROWS)


def planned(row: dict[str, str]) -> Run:
    return Run.of(*xla_tables.config(row))


def exposed_s(ep: int, nodes: int = 1, overlap: str = "off") -> float:
    """Seconds by formula for which the experts wait for tokens."""
    wanted = {"nodes": str(nodes), "overlap": overlap}
    (row,) = (r for r in WAYS if wanted.items() <= r.items() and planned(r).mesh.ep == ep)
    run = planned(row)
    return estimate(run, find_cluster(None, "h100", run.num_gpus)).parts["exposed ep"]


def test_the_table_is_complete_and_has_the_formulas_as_they_are():
    hint = f"run: python -m scripts.validation.xla_tables experts --out {TABLE}"
    assert all(row["xla_bytes"] for row in ROWS), hint
    assert NOW == ROWS, hint


@pytest.mark.parametrize("held", ["-", "held"])
def test_the_memory_formulas_agree_with_xla(held):
    errors = [abs(float(row["error_pct"])) for row in NOW if row["held"] == held]
    assert len(errors) >= 5
    assert median(errors) < 5
    assert max(errors) < 15


def test_the_step_by_formula_is_what_the_simulation_of_the_schedule_says():
    ratios = [float(row["formula_step_s"]) / float(row["step_s"]) for row in NOW[: len(WAYS)]]
    assert 0.9 < median(ratios) < 1.1
    assert 0.75 < min(ratios) and max(ratios) < 1.25


def test_the_planner_finds_that_everything_fits_that_xla_fits():
    gpu = find_gpu("h100")
    for row in ROWS:
        assert (
            breakdown(planned(row)).peak_bytes <= gpu.usable_bytes
            and int(row["xla_bytes"]) <= gpu.usable_bytes
        ), row


def test_a_token_that_travels_once_to_a_node_is_waited_for_less():
    assert exposed_s(64, nodes=8) < exposed_s(64)
    assert exposed_s(8) < exposed_s(16) < exposed_s(64)


def test_the_ways_are_shown_as_a_table():
    lines = xla_tables.experts(ROWS).splitlines()
    assert len(lines) == 2 + len(WAYS)
    assert lines[2].startswith("| 8 | at once | ")
    assert any(line.startswith("| 64 | 8 nodes, overlap | ") for line in lines)


@pytest.mark.wide
def test_xla_still_takes_what_the_table_says():
    row, told = xla_tables.measure(WAYS[3]), WAYS[3]
    assert int(row["xla_bytes"]) == pytest.approx(int(told["xla_bytes"]), rel=0.02)
    for name in ("step_s", "exposed_s", "travel_s", "exposed_travel_s"):
        assert float(row[name]) == pytest.approx(float(told[name]), rel=0.02), name
