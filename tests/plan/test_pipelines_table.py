"""The table of compiled pipelines: the formulas beside XLA, and how memory grows with the micro-batches."""

from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from scripts.validation import xla_tables
from ultrascale_jax.config import SCHEDULES
from ultrascale_jax.plan.formulas import pipeline
from ultrascale_jax.plan.formulas.activations import layer_of, saved_bytes
from ultrascale_jax.plan.formulas.pipeline_memory import w_queue_bytes
from ultrascale_jax.plan.search.search_space import UNEVEN
from ultrascale_jax.plan.workload import Run

TABLE = Path(__file__).parents[2] / "docs" / "planning" / "pipelines.csv"
ROWS = xla_tables.read(TABLE)
NOW = [xla_tables.with_formula(row) for row in ROWS]
"""The rows with what the formulas say today."""
GROWING = xla_tables.growing(ROWS)


def planned(row: dict[str, str]) -> Run:
    return Run.of(*xla_tables.config(row))


def test_the_table_is_complete_and_has_the_formulas_as_they_are():
    hint = f"run: python -m scripts.validation.xla_tables pipelines --out {TABLE}"
    assert all(row["xla_bytes"] for row in ROWS), hint
    assert NOW == ROWS, hint


@pytest.mark.parametrize("held", ["-", "held"])
def test_the_memory_formulas_agree_with_xla(held):
    errors = [abs(float(row["error_pct"])) for row in NOW if row["held"] == held]
    assert len(errors) >= 9
    assert median(errors) < 2
    assert max(errors) < 10


def test_the_step_by_formula_is_what_the_simulation_of_the_schedule_says():
    ratios = [float(row["formula_step_s"]) / float(row["step_s"]) for row in NOW]
    assert 0.85 < median(ratios) < 1.05


def test_every_schedule_for_lock_step_has_a_row():
    assert {row["schedule"] for row in ROWS} == set(SCHEDULES) - set(UNEVEN)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_uniform"])
def test_memory_is_flat_in_the_microbatches(schedule):
    rows = [row for row in NOW[: len(GROWING)] if row["schedule"] == schedule]
    # The state is in both; of XLA's bytes that are not, no more are taken for more micro-batches.
    for column, state in (
        ("temporary_bytes", 0),
        ("formula_bytes", int(rows[0]["argument_bytes"])),
    ):
        sizes = [int(row[column]) - state for row in rows]
        assert len(sizes) == 4
        assert max(sizes) < 1.1 * min(sizes)
        assert sizes[3] == pytest.approx(sizes[2], rel=1e-3)


def test_memory_of_afab_grows_by_what_a_stage_keeps():
    rows = [row for row in GROWING if row["schedule"] == "afab"]
    for row, more in pairwise(rows):
        run = planned(row)
        layer = layer_of(run)
        # What the layers of a stage keep, and the gradient that waits at the end of the pipeline.
        stage = (
            run.rank_layers * sum(saved_bytes(run, layer).values()) + layer.width * layer.residual
        )
        grown = int(more["temporary_bytes"]) - int(row["temporary_bytes"])
        assert grown == pytest.approx(run.microbatches * stage, rel=0.02)


def test_zero_bubble_takes_no_more_than_interleaving_and_its_w_queue():
    for m in ("8", "64"):
        by = {row["schedule"]: row for row in GROWING if row["microbatches"] == m}
        run = planned(by["zb_uniform"])
        chunks = pipeline.counts(run).slots["weights"] + 1
        queue = chunks * run.chunk_layers * w_queue_bytes(run, layer_of(run))
        more = int(by["zb_uniform"]["xla_bytes"]) - int(by["interleaved"]["xla_bytes"])
        assert more < 1.05 * queue


@pytest.mark.wide
def test_xla_still_takes_what_the_table_says():
    row, told = xla_tables.measure(GROWING[4]), GROWING[4]
    assert int(row["xla_bytes"]) == pytest.approx(int(told["xla_bytes"]), rel=0.02)
    assert float(row["step_s"]) == pytest.approx(float(told["step_s"]), rel=0.02)


def test_growth_is_shown_by_schedule_and_microbatches():
    lines = xla_tables.growth(ROWS).splitlines()
    assert lines[0] == "| schedule | m 8 | m 16 | m 32 | m 64 |"
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| afab",
        "| 1f1b",
        "| interleaved",
        "| zb_uniform",
    ]
