"""Published runs of other trainers as an outside check: no constant of the planner was fitted to them."""

import csv
import math
import statistics
from pathlib import Path

import pytest

from ultrascale_jax.config import MeshConfig, parse_mesh
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.speed import estimate
from ultrascale_jax.plan.workload import Run, Shape

FILE = Path(__file__).parents[2] / "docs/planning/published_runs.csv"
SIZES = (*("d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),)


def read() -> list[dict[str, str]]:
    with FILE.open(newline="") as file:
        return list(csv.DictReader(file))


def run_of(row: dict[str, str]) -> Run:
    return Run(
        shape=Shape(**{name: int(row[name]) for name in SIZES}, gated=row["gated"] == "1"),
        mesh=MeshConfig(**({"fsdp": 1} | parse_mesh(row["mesh"]))),
        seq_len=int(row["seq_len"]),
        sequences=int(row["mbs"]),
        micro_batches=int(row["gas"]),
        zero=int(row["zero"]),
        remat=row["remat"],
        precision=row["precision"],
        schedule=row["schedule"] or "1f1b",
        virtual_stages=int(row["virtual_stages"]),
    )


def ratio(row: dict[str, str]) -> float:
    cluster = find_cluster(row["cluster"] or None, row["gpu"], int(row["gpus"]))
    return estimate(run_of(row), cluster).tokens_per_s_gpu / float(row["tok_s_gpu"])


def test_every_row_is_a_run_on_the_gpus_that_it_names():
    for row in read():
        assert run_of(row).num_gpus == int(row["gpus"])
        find_cluster(row["cluster"] or None, row["gpu"], int(row["gpus"]))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_maxtext_which_is_jax_too_is_predicted_within_a_fifth(precision):
    ratios = [
        ratio(row)
        for row in read()
        if row["software"] == "MaxText" and row["precision"] == precision
    ]
    assert len(ratios) >= 10
    assert statistics.median(abs(math.log(r)) for r in ratios) < math.log(1.15)
    assert max(abs(math.log(r)) for r in ratios) < math.log(1.2)


def test_more_nodes_cost_maxtext_what_was_measured():
    rows = [row for row in read() if "a3/llama_2_7b" in row["source"]]
    one, sixteen = ratio(rows[0]), ratio(rows[-1])
    assert (rows[0]["gpus"], rows[-1]["gpus"]) == ("8", "128")
    assert sixteen / one == pytest.approx(1, abs=0.15)
