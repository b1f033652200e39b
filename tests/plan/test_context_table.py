"""The table of compiled long sequences: the formulas beside XLA, and what it says of the strategies."""

from pathlib import Path
from statistics import median

import pytest

from scripts.validation import xla_tables
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster, find_gpu
from ultrascale_jax.plan.workload import Run

TABLE = Path(__file__).parents[2] / "docs" / "planning" / "context.csv"
ROWS = xla_tables.read(TABLE)
NOW = [xla_tables.with_formula(row) for row in ROWS]
"""The rows with what the formulas say today."""


def planned(row: dict[str, str]) -> Run:
    return Run.of(*xla_tables.config(row))


def step_s(**wanted: str) -> float:
    """Seconds by formula of the row with these columns."""
    (row,) = (r for r in NOW if wanted.items() <= r.items() and r["remat"] == "full")
    return float(row["formula_step_s"])


def test_the_table_is_complete_and_has_the_formulas_as_they_are():
    hint = f"run: python -m scripts.validation.xla_tables context --out {TABLE}"
    assert all(row["xla_bytes"] for row in ROWS), hint
    assert NOW == ROWS, hint


@pytest.mark.parametrize("held", ["-", "held"])
def test_the_memory_formulas_agree_with_xla(held):
    errors = [abs(float(row["error_pct"])) for row in NOW if row["held"] == held]
    assert len(errors) >= 5
    assert median(errors) < 3
    assert max(errors) < 10


def test_the_step_by_formula_is_what_the_simulation_of_the_schedule_says():
    ratios = [float(row["formula_step_s"]) / float(row["step_s"]) for row in NOW]
    assert 0.9 < median(ratios) < 1.02
    assert 0.8 < min(ratios) and max(ratios) < 1.1


def test_the_planner_finds_that_everything_fits_that_xla_fits():
    gpu = find_gpu("h100")
    for row in ROWS:
        assert (
            breakdown(planned(row)).peak_bytes <= gpu.usable_bytes
            and int(row["xla_bytes"]) <= gpu.usable_bytes
        ), row


def test_zigzag_is_faster_than_natural_order_and_exchanged_heads_than_a_long_ring():
    eight = {"mesh": "cp=8", "seq_len": "131072", "model": "LLAMA3_8B"}
    zigzag = step_s(**eight, strategy="zigzag", ulysses="1")
    assert step_s(**eight, strategy="ring") > 1.5 * zigzag
    assert step_s(**eight, strategy="ulysses") < zigzag
    many = {"mesh": "cp=64", "seq_len": "1048576", "strategy": "zigzag"}
    assert step_s(**many, ulysses="8") < step_s(**many, ulysses="1")


def test_communication_is_hidden_where_pieces_are_long():
    for row in ROWS:
        run = planned(row)
        if run.ring[0] > 1 and run.context.strategy != "allgather" and run.mesh.tensor == 1:
            hidden = run.seq_len / run.ring[0] >= 16384
            step = estimate(run, find_cluster(None, "h100", run.num_gpus))
            for waits in (step.parts.get("exposed cp", 0.0), float(row["exposed_cp_s"])):
                assert waits < (0.02 if hidden else 0.1) * step.step_s, row


def test_the_table_is_shown_beside_published_runs():
    lines = xla_tables.context(ROWS).splitlines()
    assert lines[0].split(" | ")[0] == "| tokens"
    peers = [line.split("|")[-2].strip() for line in lines[2:]]
    assert sorted(filter(None, peers)) == ["1,071", "2,540", "3,890", "548"]
    first = lines[2].removeprefix("| ").split(" | ")
    assert first[:5] == ["32,768", "8", "`fsdp=8`", "flash", "full"]


@pytest.mark.wide
def test_xla_still_takes_what_the_table_says():
    row, told = xla_tables.measure(ROWS[7]), ROWS[7]
    assert int(row["xla_bytes"]) == pytest.approx(int(told["xla_bytes"]), rel=0.02)
    assert float(row["step_s"]) == pytest.approx(float(told["step_s"]), rel=0.02)
    for name in ("exposed_s", "exposed_cp_s"):
        assert float(row[name]) == pytest.approx(float(told[name]), abs=0.01 * float(row["step_s"]))
