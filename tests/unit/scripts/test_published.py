"""Published runs of other trainers as an outside check: no constant of the planner was fitted to them."""

import csv
from pathlib import Path
from statistics import median

import pytest

from scripts.validation import accuracy, xla_tables
from scripts.validation.published import Published, read
from ultrascale_jax.plan.formulas import costs

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


def test_held_out_runs_have_the_published_sizes():
    billions = {"nemotron4-340b": 341, "grok-1": 316, "llama4-maverick": 401, "deepseek-v3": 671}
    billions |= {"qwen3-235b-a22b": 235, "mixtral-8x22b": 141, "gpt-oss-120b": 117}
    held_out = read(FILE.with_name("held_out_runs.csv"))
    assert all(
        row.earlier_prediction > 0 and row.run.num_gpus == row.cluster.num_gpus for row in held_out
    )
    found = {row.model: row.run.shape.num_params / 1e9 for row in held_out}
    assert {name: found[name] for name in billions} == pytest.approx(billions, rel=0.005)
    assert {row.model for row in held_out if row.run.lora.enabled} == {"llama3-70b"}


def test_the_rates_follow_the_measurements():
    ratios: dict[str, list[float]] = {}
    for row in xla_tables.read(xla_tables.PLANNING / "rates.csv"):
        alone = accuracy.tflops(row) / costs.BUSY_SHARE
        ratios.setdefault(row["operation"], []).append(alone / float(row["tflops"]))
    assert list(ratios) == ["product", "attention", "attention backward"]
    assert all(median(some) == pytest.approx(1, abs=0.05) for some in ratios.values())


def test_each_peer_trains_the_tokens_of_the_run_of_ours_beside_it():
    rows = xla_tables.read(xla_tables.PLANNING / "peers.csv")
    for theirs, ours in zip(rows[::2], rows[1::2], strict=True):
        assert (theirs["run"], ours["trainer"]) == (ours["run"], "ultrascale_jax")
        shapes = [xla_tables.config(row) for row in (theirs, ours)]
        tokens = {(gpus, cfg.train.global_batch, cfg.data.seq_len) for cfg, gpus in shapes}
        assert len(tokens) == 1 and theirs["tok_s_gpu"]
