"""Published runs of other trainers as an outside check: no constant of the planner was fitted to them."""

import csv
import dataclasses
import math
import statistics
from pathlib import Path

import pytest

from scripts.validation import published
from scripts.validation.published import COLUMNS, predict, read, summaries
from scripts.validation.runs import Prediction, Row
from ultrascale_jax.config import UserError

FILE = Path(__file__).parents[2] / "docs/planning/published_runs.csv"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return read(FILE)


def ratios(rows: list[Row], software: str, precision: str) -> list[float]:
    return [
        predict(row).ratio
        for row in rows
        if row.software == software and row.run.precision == precision
    ]


def write(path: Path, *lines: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    return path


def first_line() -> dict[str, str]:
    with FILE.open(newline="") as file:
        return next(csv.DictReader(file))


def test_every_line_is_read_as_it_stands(rows):
    with FILE.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(rows) == len(lines) == 149
    for row, line in zip(rows, lines, strict=True):
        assert row.run.num_gpus == row.cluster.num_gpus == int(line["gpus"])
        assert row.tokens_per_s_gpu == float(line["tok_s_gpu"])
        assert row.memory_gib == (float(line["mem_gib"]) if line["mem_gib"] else None)
    first = rows[0]
    assert (first.software, first.model, first.assumed) == ("torchtitan", "llama3-8b", "")
    assert (first.run.mesh.fsdp, first.run.sequences, first.run.zero) == (8, 2, 3)
    assert first.run.shape.num_params == pytest.approx(8.03e9, rel=1e-3)
    assert first.cluster.name == "grand-teton"


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_maxtext_which_is_jax_too_is_predicted_within_a_fifth(rows, precision):
    found = ratios(rows, "MaxText", precision)
    assert len(found) >= 10
    assert statistics.median(abs(math.log(r)) for r in found) < math.log(1.15)
    assert max(abs(math.log(r)) for r in found) < math.log(1.2)


def test_blackwell_and_experts_without_a_pipeline_are_predicted_within_a_fifth(rows):
    found = [r for r in rows if r.software == "Megatron-Bridge" and r.run.mesh.pp == 1]
    assert {r.cluster.gpu.name for r in found} == {"h100", "b200", "gb200"}
    assert {r.run.shape.experts is None for r in found} == {True, False}
    assert max(abs(math.log(predict(r).ratio)) for r in found) < math.log(1.2)


def test_a_model_with_experts_is_named_and_its_tokens_visit_each_node_once(rows):
    found = next(row for row in rows if row.model == "deepseek-v3")
    assert found.run.shape.num_params == pytest.approx(671e9, rel=1e-2)
    assert (found.run.mesh.ep, found.run.moe.a2a_groups) == (
        64,
        16,
    )  # sp=2 leaves 4 of ep in a node


def test_more_nodes_cost_maxtext_what_was_measured(rows):
    found = [row for row in rows if "a3/llama_2_7b" in row.source]
    assert (found[0].run.num_gpus, found[-1].run.num_gpus) == (8, 128)
    assert predict(found[-1]).ratio / predict(found[0]).ratio == pytest.approx(1, abs=0.15)


def test_a_summary_of_known_ratios(rows):
    bf16, fp8 = rows[:2]
    pipeline = next(row for row in rows if row.run.mesh.pp > 1)
    measured = [(bf16, 0.5), (bf16, 1.0), (bf16, 1.1), (fp8, 2.0), (pipeline, 3.0)]
    predictions = [
        Prediction(
            row=dataclasses.replace(row, software="x", tokens_per_s_gpu=100.0),
            tokens_per_s_gpu=100 * ratio,
            memory_gib=1.0,
        )
        for row, ratio in measured
    ]
    found = summaries(predictions)
    assert [(s.gpu, s.pipeline, s.experts, s.precision, s.rows) for s in found] == [
        ("h100-96gb", False, False, "bf16", 3),
        ("h100-96gb", False, False, "fp8", 1),
        ("h100-96gb", True, False, "fp8", 1),
    ]
    assert (found[0].median_ratio, found[0].worst_ratio) == (1.0, 0.5)
    assert found[0].median_error == pytest.approx(math.log(1.1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": "wide"}, "d_model='wide': must be a number, 1 or more"),
        ({"gated": "2"}, "gated='2': must be 0 or 1"),
        ({"zero": "4"}, "zero='4': must be 0 or 1 or 2 or 3"),
        ({"num_kv_heads": "5"}, "num_kv_heads=5: must divide"),
        ({"gpus": "16"}, "mesh='fsdp=8': the sizes multiply to 8, but there are 16"),
        ({"mesh": "fsdp8"}, "mesh='fsdp8': write axes as fsdp=4,tp=2"),
        ({"mesh": "cp=8", "seq_len": "100"}, "seq_len=100: cp=8 must divide it"),
        ({"cluster": "moon"}, "cluster='moon': choose one of"),
        ({"gpu": "h1000"}, "gpu='h1000': "),
        ({"remat": "some"}, "remat='some': must be none, selective"),
        ({"remat": "auto"}, "remat='auto': is for a configuration"),
        ({"precision": "fp4"}, "precision='fp4': choose one of bf16, fp32, fp8"),
        ({"schedule": "2f2b"}, "pp.schedule='2f2b': must be one of"),
        ({"tok_s_gpu": "nan"}, "tok_s_gpu='nan': must be a positive number"),
        ({"mem_gib": "-3"}, "mem_gib='-3': must be a positive number"),
        ({"software": ""}, "software='': must not be empty"),
        ({"shape": "GPT5"}, "shape='GPT5': must be the name of a model in configs/shapes.py"),
    ],
)
def test_what_makes_no_sense_is_named_by_line_and_column(tmp_path, changes, message):
    line = first_line()
    path = write(tmp_path / "runs.csv", line, line | changes)
    with pytest.raises(UserError) as error:
        read(path)
    assert f"{path}, line 3, " in str(error.value) and message in str(error.value)


@pytest.mark.parametrize("column", COLUMNS)
def test_a_missing_column_is_named(tmp_path, column):
    line = first_line()
    del line[column]
    with pytest.raises(UserError, match=f"has no column {column}$"):
        read(write(tmp_path / "runs.csv", line))


def test_a_mesh_without_quotes_is_refused(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(FILE.read_text().replace('"fsdp=8,cp=1"', "fsdp=8,cp=1"))
    with pytest.raises(UserError, match=r"line 6, .*quote those with a comma"):
        read(path)


def test_published_runs_are_one_line_for_each_model_and_precision(capsys):
    published.main([str(FILE)])
    text = capsys.readouterr().out
    lines = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    (line,) = (line for line in lines if "llama3-70b bf16 128-2048" in line)
    assert line.startswith("7 MaxText llama3-70b bf16 128-2048 fsdp=128 1,031-1,061 ")
    assert "source 7: dgxc-benchmarking maxtext (25.01)" in lines
    assert any(line.startswith("MaxText h100 no pipeline bf16 17 ") for line in lines)
    assert lines[-2].startswith("149 runs: median predicted / measured ")


def test_a_published_run_that_makes_no_sense_is_one_line(tmp_path, capsys):
    path = tmp_path / "runs.csv"
    path.write_text(FILE.read_text().replace("grand-teton,8,", "grand-teton,9,", 1))
    with pytest.raises(SystemExit) as stop:
        published.main([str(path)])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert "line 2, mesh='fsdp=8': the sizes multiply to 8" in error
