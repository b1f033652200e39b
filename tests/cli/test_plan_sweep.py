"""`python -m scripts.plan sweep`: a grid measured or predicted, row by row, and never twice."""

import csv
import json
import signal

import pytest

from scripts.validation import validate
from ultrascale_jax.cli import plan


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def swept(path, *arguments):
    plan.main(["sweep", "debug", "--out", str(path), *arguments])
    return rows(path)


def test_a_prediction_writes_every_legal_row_once(tmp_path, capsys):
    path = tmp_path / "runs.csv"
    grid = ["--predict", "--gpus", "8", "--grid", "fsdp=4,8 sp=1,2 zero=1,3"]
    found = swept(path, *grid)
    assert [(row["mesh"], row["zero"]) for row in found] == [
        ("fsdp=4,sp=2", "1"),
        ("fsdp=4,sp=2", "3"),
        ("fsdp=8", "1"),
        ("fsdp=8", "3"),
    ]
    assert {(row["status"], row["source"], row["model"]) for row in found} == {
        ("ok", "formula", "debug")
    }
    assert swept(path, *grid) == found
    assert len(swept(path, *grid, "--data.seq-len", "512")) == 8
    assert len(swept(path, *grid, "--train.precision", "fp8")) == 12
    assert len(swept(path, *grid, "--gpu", "h200")) == 16
    capsys.readouterr()


def test_a_run_that_cannot_fit_is_nan(tmp_path, capsys):
    path = tmp_path / "runs.csv"
    plan.main(["sweep", "llama3_70b", "--out", str(path), "--predict", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (
        (result["verb"], result["schema"]) == ("sweep", 1)
        and result["complete"]
        and result["csv"] == str(path)
    )
    assert result["rows"] and {row["status"] for row in result["rows"]} == {"out of memory"}
    assert {row["tok_s"] for row in result["rows"]} == {None}
    assert {row["mem_gb"] for row in rows(path)} == {"nan"}


def test_the_benchmarks_models_have_its_names_and_can_be_validated(tmp_path, capsys):
    path = tmp_path / "runs.csv"
    sizes = {"vocab-size": 131072, "d-model": 2048, "d-ff": 8192, "num-layers": 16}
    sizes |= {"num-heads": 32, "num-kv-heads": 32, "head-dim": 64}
    model = [word for name, size in sizes.items() for word in (f"--model.{name}", str(size))]
    batch = "--data.seq-len 4096 --train.global-batch 256 --train.microbatches 16".split()
    grid = ["--predict", "--grid", "fsdp=4,8 sp=1,2 zero=1"]
    plan.main(["sweep", "llama32_1b", "--out", str(path), *grid, *model, *batch])
    assert {row["model"] for row in rows(path)} == {"1B"}
    capsys.readouterr()
    validate.main([str(path), "--half", "all", "--json"])
    assert json.loads(capsys.readouterr().out)["rows"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "tensor=2"], "grid='tensor=2'"),
        (["--grid", "fsdp=3", "--predict"], "grid='fsdp=3': nothing is legal on 8 devices"),
        (["--minutes", "0"], "minutes=0"),
        (["--grid", ""], "grid=''"),
        (["--predict", "--out", "/dev/null/runs.csv"], "out='/dev/null/runs.csv'"),
    ],
)
def test_nonsense_is_one_line(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        swept(tmp_path / "runs.csv", *arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
    assert not (tmp_path / "runs.csv").exists()


def test_an_interrupt_keeps_the_rows(tmp_path, capsys):
    path = tmp_path / "runs.csv"
    before = swept(path, "--predict", "--grid", "fsdp=4,8 sp=1,2")
    capsys.readouterr()

    def interrupt(*_):
        raise KeyboardInterrupt

    own = signal.signal(signal.SIGALRM, interrupt)
    try:
        # One run takes longer: it starts a process that imports JAX and compiles.
        signal.setitimer(signal.ITIMER_REAL, 1)
        with pytest.raises(SystemExit) as stop:
            swept(path, "--devices", "2", "--json")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, own)
    assert stop.value.code == 130
    result = json.loads(capsys.readouterr().out)
    assert result["rows"] == [] and not result["complete"]
    assert rows(path) == before


@pytest.mark.wide
def test_real_runs_are_measured_once_and_failures_recorded(tmp_path, capsys):
    path = tmp_path / "runs.csv"
    grid = ["--devices", "2", "--grid", "fsdp=2 pp=1,2 remat=none"]
    tiny = "--model.num-layers 1 --data.seq-len 32 --train.global-batch 2".split()
    (row,) = swept(path, *grid, *tiny)
    assert (row["status"], row["device"], row["source"]) == ("ok", "cpu", "measured")
    assert float(row["tok_s"]) == pytest.approx(2 * float(row["tok_s_gpu"]), rel=0.01)
    assert float(row["tok_s"]) > 0 and row["mfu_pct"] == "nan"
    before = path.read_text()
    swept(path, *grid, *tiny)
    assert path.read_text() == before
    # A process that ends without an answer: its model is of no kind that can be made.
    failed = swept(path, *grid, *tiny, "--kernels.attention", "cudnn")[-1]
    assert failed["status"].startswith("failed: ") and failed["tok_s"] == "nan"
    late = swept(path, *grid, *tiny, "--data.seq-len", "64", "--minutes", "0.01")[-1]
    assert late["status"] == "out of time"
    pipeline = ["--devices", "2", "--grid", "pp=2 fsdp=1 schedule=interleaved"]
    four = [*tiny, "--model.num-layers", "4", "--train.microbatches", "2"]
    piped = swept(path, *pipeline, *four)[-1]
    assert (piped["status"], piped["schedule"]) == ("ok", "interleaved v2")
    assert "--pp.schedule interleaved" in piped["command"]
    capsys.readouterr()
