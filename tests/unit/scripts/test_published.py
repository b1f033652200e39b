"""Published runs of other trainers as an outside check: no constant of the planner was fitted to them."""

import csv
import math
import statistics
from pathlib import Path

import pytest

from scripts.validation import published
from scripts.validation.published import predict, read
from scripts.validation.runs import Row
from ultrascale_jax.config import UserError

FILE = Path(__file__).parents[3] / "docs/planning/published_runs.csv"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return read(FILE)


def ratios(rows: list[Row], software: str, precision: str) -> list[float]:
    return [
        predict(row).ratio
        for row in rows
        if row.software == software and row.run.precision == precision
    ]


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": "wide"}, "d_model='wide': must be a number, 1 or more"),
        ({"gpus": "16"}, "mesh='fsdp=8': the sizes multiply to 8, but there are 16"),
        ({"cluster": "moon"}, "cluster='moon': choose one of"),
        ({"remat": "auto"}, "remat='auto': is for a configuration"),
        ({"tok_s_gpu": "nan"}, "tok_s_gpu='nan': must be a positive number"),
        ({"shape": "GPT5"}, "shape='GPT5': must be the name of a model in configs/shapes.py"),
    ],
)
def test_what_makes_no_sense_is_named_by_line_and_column(tmp_path, changes, message):
    with FILE.open(newline="") as file:
        line = next(csv.DictReader(file))
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, line)
        writer.writeheader()
        writer.writerows([line, line | changes])
    with pytest.raises(UserError) as error:
        read(path)
    assert f"{path}, line 3, " in str(error.value) and message in str(error.value)


def test_published_runs_are_one_line_for_each_model_and_precision(capsys):
    published.main([str(FILE)])
    text = capsys.readouterr().out
    lines = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    (line,) = (line for line in lines if "llama3-70b bf16 128-2048" in line)
    assert line.startswith("7 MaxText llama3-70b bf16 128-2048 fsdp=128 1,031-1,061 ")
    assert "source 7: dgxc-benchmarking maxtext (25.01)" in lines
    assert any(line.startswith("MaxText h100 no pipeline bf16 17 ") for line in lines)
    assert lines[-2].startswith("149 runs: median predicted / measured ")
