"""The command that a user types: it trains, evaluates, samples and profiles, or is refused in one line."""

import contextlib
import io
import json
import math
import os
import subprocess
import sys

import pytest

from tests.commands import refused, ultrascale
from tests.runs import step_rows
from ultrascale_jax.cli.recipes import load_recipe
from ultrascale_jax.cli.train import look_back, write_sample
from ultrascale_jax.launch.events import read_events

TINY = (
    *("train", "debug", "--model.num-layers", 1, "--model.d-model", 32, "--model.d-ff", 64),
    *("--model.head-dim", 4, "--data.seq-len", 64, "--train.global-batch", 8),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 4 steps on 8 devices and what its command printed."""
    folder = tmp_path_factory.mktemp("train") / "run"
    words = ("--mesh", "fsdp=4,tp=2", "--train.steps", 4, "--train.eval-every", 2)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = ultrascale(*TINY, *words, "--profile", "2:3", "--log.run-dir", folder)
    assert code is None
    return folder, out.getvalue()


def test_a_run_trains_evaluates_and_saves(trained):
    folder, out = trained
    rows = step_rows(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert out.startswith("1 process, 8 devices (cpu)\n")
    assert "step 1/4" in out and "step 4/4  eval loss" in out
    assert f"{folder} is at step 4 of 4" in out
    assert "a sample" not in out  # after so few steps
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["4"]
    saved = json.loads((folder / "config.json").read_text())
    assert saved["mesh"] == {"pp": 1, "dp": 1, "fsdp": 4, "ep": 1, "cp": 1, "sp": 1, "tp": 2}
    [trace] = (folder / "profile").rglob("perfetto_trace.json.gz")
    assert trace.stat().st_size > 1000


def test_a_run_of_many_steps_writes_a_sample_and_records_it(trained, capsys):
    folder, _ = trained
    write_sample(load_recipe(str(folder / "config.json")), 4, 20)
    sample = capsys.readouterr().out.partition("a sample:\n\n")[2]
    assert sample.startswith("def ")
    [event] = [event for event in read_events(folder) if event["kind"] == "sample"]
    assert (event["step"], event["prompt"]) == (4, "def ") and sample.startswith(event["text"])


def test_a_profiled_run_ends_with_a_report_that_a_command_prints_again(trained, capsys):
    folder, out = trained
    assert "profile of a step of 1 (2 to 2) on cpu, mean of 8 devices" in out
    assert out.count("no prediction") == 1
    ultrascale("inspect", folder, "--trace", "--json")
    report = json.loads(capsys.readouterr().out)["trace"]
    measured = report["measured"]
    axes = {axis for name in measured["exposed_s"] for axis in name.split("*")}
    assert {"fsdp", "tp"} <= axes
    assert {"attention", "mlp", "loss", "optimizer"} <= set(measured["blocks_s"])
    kernels, blocks = measured["kernels_s"], measured["blocks_s"]
    assert "matrix products" in kernels and "unnamed" not in kernels
    parts = [*kernels.values(), *measured["exposed_s"].values()]
    whole = math.fsum([*parts, measured["waiting_for_copies_s"], measured["idle_s"]])
    assert whole == pytest.approx(measured["step_s"])
    assert math.fsum(blocks.values()) == pytest.approx(math.fsum(kernels.values()))
    assert report["predicted"] is None and len(report["devices"]) == 8


def test_a_run_of_many_steps_ends_with_its_losses_and_what_to_try_next(tmp_path):
    rows = [{"step": n, "loss": 9.0 - n} for n in range(1, 9)]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, {"step": 9, "loss": None}])
    (tmp_path / "metrics.jsonl").write_text(text)
    lines = look_back(str(tmp_path)).splitlines()
    assert lines[2].startswith("8 |*") and lines[10].startswith("1 |") and lines[12].endswith(" 8")
    assert f"  ultrascale watch {tmp_path} " in lines[-3]
    (tmp_path / "metrics.jsonl").write_text("")
    assert "next:" in look_back(str(tmp_path))


@pytest.mark.parametrize("name", ["a[1]", "proj [v2]/run", "a\\b", "a\udcff"])
def test_a_run_directory_that_no_checkpoint_could_be_read_from_is_refused_at_once(
    tmp_path, monkeypatch, capsys, name
):
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, *TINY, "--log.run-dir", name).startswith("log.run_dir=")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "platform"), [("train", "cuda"), ("doctor", "no-such-platform")]
)
def test_a_kind_of_device_that_is_not_here_is_one_line(tmp_path, command, platform):
    done = subprocess.run(
        [sys.executable, "-m", "ultrascale_jax", command, "debug", "--log.run-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": platform, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: JAX_PLATFORMS='{platform}': JAX finds no such device")
    assert done.stderr.count("\n") == 1 and done.stdout == ""
