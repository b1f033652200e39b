"""nanotron's step times against the playbook's figures, none of which a constant was fitted on, and its stalls."""

import pytest

from scripts.validation.nanotron import run_of
from scripts.validation.nanotron_time import (
    NANOTRON,
    NanotronStep,
    benchmark_stalls,
    estimate_with_stalls,
)
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.workload import Run

OUTSIDE = ("bubble", "exposed pp", "exposed fsdp", "optimizer", "step overhead")


def step(run: Run) -> StepPrediction:
    """A step that ran."""
    cluster = find_cluster("playbook", "h100", run.num_gpus)
    return NanotronStep(run, cluster).predict(0)


@pytest.mark.parametrize(
    ("tp", "mbs", "measured"),
    [(2, 4, 14167), (4, 10, 13460), (8, 20, 10889), (16, 40, 6159), (32, 100, 3610)],
)
def test_nanotron_3b_by_tensor_parallelism(tp, mbs, measured):
    # The playbook's figure of TP with sequence parallelism; 3B was not among the rows of the fit.
    row = {"model": "3B", "zero": 0, "dp": 1, "pp": 1, "tp": tp, "mbs": mbs, "gas": 1}
    found = step(run_of(row))
    assert found.tokens_per_s_gpu == pytest.approx(measured, rel=0.10)


@pytest.mark.parametrize(
    ("pp", "microbatches", "measured"),
    [(4, 3, 8000), (8, 7, 7900), (16, 15, 6700), (2, 32, 15300), (4, 32, 13900), (16, 32, 7900)],
)
def test_nanotron_3b_by_pipeline_parallelism(pp, microbatches, measured):
    # The playbook's figure of 1F1B.
    row = {"model": "3B", "zero": 0, "dp": 1, "pp": pp, "tp": 1, "mbs": 1, "gas": microbatches}
    found = step(run_of(row))
    assert found.tokens_per_s_gpu == pytest.approx(measured, rel=0.15)


def test_it_runs_1f1b_of_separate_programs():
    row = {"model": "8B", "zero": 1, "dp": 2, "pp": 4, "tp": 1, "mbs": 2, "gas": 32}
    parts = step(run_of(row)).parts
    rest = sum(s for name, s in parts.items() if name not in OUTSIDE)
    assert parts["bubble"] < 3 / 32 * rest  # its stages are cut by cost: the others are shorter


def test_stalls_lengthen_pipelines_by_the_micro_batch():
    row = {"model": "8B", "zero": 1, "dp": 16, "pp": 4, "tp": 8, "mbs": 2, "gas": 8}
    planned = run_of(row)
    cluster = find_cluster("playbook", "h100", 512)
    assert benchmark_stalls(planned, cluster) == 1
    found = estimate_with_stalls(planned, cluster)
    assert found.step_s - step(planned).step_s == pytest.approx(11 * 2 * NANOTRON.stall_s)


@pytest.mark.parametrize(
    ("fields", "risk"),
    [
        ({"pp": 4, "tp": 2, "gas": 16}, 0),
        ({"pp": 4, "tp": 2, "dp": 2, "gas": 16}, 0),
        ({"dp": 8, "gas": 4}, 0),
        ({"pp": 2, "tp": 32, "gas": 4}, 1),
        ({"pp": 2, "tp": 4, "dp": 8, "gas": 32, "zero": 0}, 1),
        ({"pp": 2, "tp": 4, "dp": 32, "gas": 8}, 0.5),
        ({"pp": 4, "dp": 2, "mbs": 4, "gas": 32}, 1),
    ],
    ids=str,
)
def test_where_the_benchmark_stalled(fields, risk):
    row = {"model": "8B", "zero": 1, "dp": 1, "pp": 1, "tp": 1, "mbs": 1} | fields
    planned = run_of(row)
    cluster = find_cluster("playbook", "h100", planned.num_gpus)
    assert benchmark_stalls(planned, cluster) == pytest.approx(risk, abs=0.01)
