"""The grid of a sweep, its rows, and the table that lets it go on where it ended."""

import csv
import dataclasses
import math

import pytest

from ultrascale_jax.cli.plan_commands import sweep
from ultrascale_jax.cli.plan_commands.sweep import Outcome, Table
from ultrascale_jax.cli.plan_commands.words import parse_choices
from ultrascale_jax.config import MeshConfig, UserError
from ultrascale_jax.configs.debug import config as debug
from ultrascale_jax.configs.llama3_70b import config as llama3_70b
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.training.model_shape import ModelShape

CLUSTER = find_cluster(None, "h100", 8)
SAID = {"model": "debug", "device": "cpu", "source": "measured", "command": "train debug"}
KEY = SAID | {"schedule": ""}
BENCHMARK = "model,nodes,mbs,gas,gbs,dp,pp,tp,zero,mfu_pct,tok_s_gpu,tok_s,mem_gb".split(",")


def run(shape=None):
    return Run(
        shape=shape or ModelShape.of(debug.model),
        mesh=MeshConfig(dp=2, fsdp=2, sp=2),
        seq_len=256,
        sequences=2,
        microbatches=4,
    )


def grid(text, cfg=debug):
    runs = sweep.grid(cfg, CLUSTER, parse_choices("grid", text) if text else {}).runs
    return [(r.label, r.remat) for r in runs]


def test_a_grid_is_its_product_without_what_is_illegal():
    found = grid("fsdp=1,2,4 sp=1,2 dp=1,2,4,8 zero=0,3 remat=full,none")
    meshes = {label.split(" zero")[0] for label, _ in found}
    assert meshes == {"dp8", "dp4 fsdp2", "dp4 sp2", "dp2 fsdp4", "dp2 fsdp2 sp2", "fsdp4 sp2"}
    assert len(found) == len(set(found))
    assert {remat for _, remat in found} == {"full", "none"}
    # dp alone is one run for both ZeRO stages; where fsdp is named, stage 0 is run as asked.
    assert sum(label.startswith("dp8 ") for label, _ in found) == 2
    assert sum(label.startswith("fsdp4 sp2 ") for label, _ in found) == 4


def test_what_a_grid_does_not_name_is_the_recipes():
    train = dataclasses.replace(debug.train, zero=2, microbatches=2, remat="dots")
    cfg = dataclasses.replace(debug, train=train)
    assert grid("fsdp=4 sp=2", cfg) == [("fsdp4 sp2 zero2 mbs2 x2 dots", "dots")]
    assert grid("fsdp=4 sp=2 sequences=4", cfg) == [("fsdp4 sp2 zero2 mbs4 x1 dots", "dots")]


def test_a_grid_without_axes_is_all_meshes():
    labels = [label.split(" zero")[0] for label, _ in grid("pp=1")]
    assert labels == []  # one axis is named, so the others are 1
    labels = {label.split(" zero")[0] for label, _ in grid("")}
    assert {"dp8", "fsdp8", "sp8", "tp8", "fsdp2 sp2 tp2"} <= labels
    assert not any("cp" in label or "ep" in label for label in labels)


def test_a_row_has_the_columns_of_the_benchmark_first():
    outcome = Outcome(status="ok", step_s=2.0, mfu=0.5, peak_bytes=3 * 2**30)
    row = sweep.row_of(run(), CLUSTER, outcome, **SAID)
    assert tuple(row) == sweep.COLUMNS and list(row)[: len(BENCHMARK)] == BENCHMARK
    # 2 sequences x 4 micro-batches x 4 shards = 32 sequences of 256 tokens in 2 seconds on 8 devices.
    assert (row["dp"], row["pp"], row["tp"], row["gbs"]) == ("4", "1", "2", "32")
    assert (row["mbs"], row["gas"], row["nodes"]) == ("2", "4", "1")
    assert (row["tok_s"], row["tok_s_gpu"]) == ("4096.0", "512.0")
    assert (row["mfu_pct"], row["mem_gb"]) == ("50.0", "3.0")
    assert row["mesh"] == "dp=2,fsdp=2,sp=2"


def test_a_run_that_failed_is_nan_with_its_status():
    row = sweep.row_of(run(), CLUSTER, Outcome(status="out of memory"), **SAID)
    figures = [row[name] for name in ("mfu_pct", "tok_s_gpu", "tok_s", "mem_gb")]
    assert figures == ["nan"] * 4 and row["status"] == "out of memory"


def test_formulas_predict_what_fits_and_what_does_not():
    assert sweep.predict(run(), CLUSTER).step_s > 0
    outcome = sweep.predict(run(ModelShape.of(llama3_70b.model)), CLUSTER)
    assert outcome.status == "out of memory" and math.isnan(outcome.step_s)


def test_the_table_is_found_again(tmp_path):
    path = tmp_path / "new" / "runs.csv"
    table = Table(path)
    assert table.find(KEY) is None
    row = sweep.row_of(run(), CLUSTER, Outcome(status='failed: a, b\n"c"'), **SAID)
    table.add(row)
    table.add(sweep.row_of(run(), CLUSTER, Outcome(status="ok"), **(SAID | {"device": "h100"})))
    again = Table(path)
    assert again.rows == table.rows and again.find(KEY) == row
    assert again.find(KEY | {"source": "formula"}) is None
    assert again.find(KEY | {"schedule": "1f1b"}) is None
    with path.open(newline="") as file:
        assert next(csv.reader(file))[: len(BENCHMARK)] == BENCHMARK


def test_an_empty_file_becomes_a_table(tmp_path):
    path = tmp_path / "runs.csv"
    path.touch()
    Table(path).add(sweep.row_of(run(), CLUSTER, Outcome(status="ok"), **SAID))
    assert Table(path).find(KEY) is not None


def test_what_is_no_table_is_refused_before_anything_runs(tmp_path):
    binary = tmp_path / "runs.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (tmp_path, "cannot be written: Is a directory"),
        (binary / "runs.csv", "cannot be written: "),
        (binary, "is no CSV"),
    ):
        with pytest.raises(UserError, match=message):
            Table(path)


def test_the_table_of_something_else_is_not_written_to(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("model,nodes\n1B,1\n")
    with pytest.raises(UserError, match="has other columns"):
        Table(path)
    assert path.read_text() == "model,nodes\n1B,1\n"
