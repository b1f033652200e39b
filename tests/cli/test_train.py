"""The command that a user types: it trains, samples, resumes, and ends with the promised code."""

import json
import math
import os
import signal
import subprocess
import sys

import pytest

from tests.runs import step_rows
from ultrascale_jax.cli import inspect
from ultrascale_jax.cli.recipes import load_recipe
from ultrascale_jax.cli.train import look_back, main, write_sample
from ultrascale_jax.launch.events import read_events

TINY = (
    "--model.num-layers 2 --model.d-model 32 --model.d-ff 64 --model.head-dim 4 --data.seq-len 64"
)
TINY += " --train.global-batch 8"


def start(run_dir, options):
    words = f"-m scripts.train debug {TINY} {options}".split()
    return subprocess.Popen(
        [sys.executable, *words, "--log.run-dir", str(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def train(run_dir, options):
    """Exit code, stdout and stderr of a run that ends by itself."""
    process = start(run_dir, options)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 4 steps on 8 fake devices and what its command said."""
    folder = tmp_path_factory.mktemp("train") / "run"
    options = "--fake-devices 8 --mesh fsdp=2,sp=2,tp=2 --train.steps 4 --train.eval-every 2"
    return folder, *train(folder, f"{options} --profile 2:3")


@pytest.mark.parametrize("name", ["a[1]", "proj [v2]/run", "a\\b", "a\udcff"])
def test_a_run_directory_that_no_checkpoint_could_be_read_from_is_refused_at_once(
    tmp_path, monkeypatch, capsys, name
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["tests.faults.tiny", "--log.run-dir", name])
    error = capsys.readouterr().err
    assert error.startswith("error: log.run_dir=") and error.count("\n") == 1, error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_exception_ends_a_process_on_its_own_with_the_code_of_a_crash(tmp_path):
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "scripts.train",
            "tests.faults.faulty",
            "--log.run-dir",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"FAULTS": "exception@1@0", "FAULTY_RECIPE": "debug"},
    )
    _, err = process.communicate(timeout=120)
    assert process.returncode == 70, err
    assert "Traceback" in err and "fault on purpose before step 1" in err


@pytest.mark.parametrize(
    ("command", "platform"),
    [("train", "no-such-platform"), ("train", "cuda"), ("doctor", "no-such-platform")],
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


def test_a_run_of_many_steps_ends_with_its_losses_and_what_to_try_next(tmp_path):
    rows = [{"step": n, "loss": 9.0 - n} for n in range(1, 9)]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, {"step": 9, "loss": None}])
    (tmp_path / "metrics.jsonl").write_text(text)
    lines = look_back(str(tmp_path)).splitlines()
    assert lines[2].startswith("8 |*") and lines[10].startswith("1 |") and lines[12].endswith(" 8")
    assert f"  ultrascale watch {tmp_path} " in lines[-3]
    (tmp_path / "metrics.jsonl").write_text("")
    assert "next:" in look_back(str(tmp_path))


@pytest.mark.slow
def test_a_run_trains_evaluates_and_saves(trained):
    folder, code, out, err = trained
    assert code == 0, err
    rows = step_rows(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert out.startswith("1 process, 8 devices (cpu)\n")
    assert "step 1/4" in out and "step 4/4  eval loss" in out
    assert f"{folder} is at step 4 of 4" in out
    assert "a sample" not in out  # after so few steps
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["4"]
    saved = json.loads((folder / "config.json").read_text())
    assert saved["mesh"] == {"pp": 1, "dp": 1, "fsdp": 2, "ep": 1, "cp": 1, "sp": 2, "tp": 2}
    [trace] = (folder / "profile").rglob("perfetto_trace.json.gz")
    assert trace.stat().st_size > 1000


@pytest.mark.slow
def test_a_run_of_many_steps_writes_a_sample_and_records_it(trained, capsys):
    folder, code, _, err = trained
    assert code == 0, err
    write_sample(load_recipe(str(folder / "config.json")), 4, 20)
    sample = capsys.readouterr().out.partition("a sample:\n\n")[2]
    assert sample.startswith("def ")
    [event] = [event for event in read_events(folder) if event["kind"] == "sample"]
    assert (event["step"], event["prompt"]) == (4, "def ") and sample.startswith(event["text"])


@pytest.mark.slow
def test_a_profiled_run_ends_with_a_report_that_a_command_prints_again(trained, capsys):
    folder, _, out, _ = trained
    assert "profile of a step of 1 (2 to 2) on cpu, mean of 8 devices" in out
    assert out.count("no prediction") == 1
    inspect.main([str(folder), "--trace", "--json"])
    report = json.loads(capsys.readouterr().out)["trace"]
    found = report["measured"]
    axes = {axis for name in found["exposed_s"] for axis in name.split("*")}
    assert {"fsdp", "sp", "tp"} <= axes
    assert {"attention", "mlp", "loss", "optimizer"} <= set(found["blocks_s"])
    assert "matrix products" in found["kernels_s"] and "unnamed" not in found["kernels_s"]
    parts = [*found["kernels_s"].values(), *found["exposed_s"].values()]
    whole = math.fsum([*parts, found["waiting_for_copies_s"], found["idle_s"]])
    assert whole == pytest.approx(found["step_s"])
    assert math.fsum(found["blocks_s"].values()) == pytest.approx(
        math.fsum(found["kernels_s"].values())
    )
    assert report["predicted"] is None and len(report["devices"]) == 8


@pytest.mark.wide
def test_the_same_command_with_more_steps_continues_in_a_pipeline(trained):
    folder, code, _, err = trained
    assert code == 0, err
    options = "--fake-devices 2 --mesh pp=2 --train.microbatches 2 --train.steps 5"
    code, out, err = train(folder, options)
    assert code == 0, err
    assert "pipeline 1f1b: 2 ranks with 1 stage each, 2 micro-batches; bubble 50.0% by" in out
    assert f"resumed from {folder}/checkpoints/4" in out
    assert "changed since: train.steps: saved 4, now 5" in out
    assert "learning rate of update 5: 3.00e-04, by the saved settings " in out
    assert [row["step"] for row in step_rows(folder)] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_the_same_command_chooses_again_and_continues_on_other_devices(tmp_path):
    options = "--mesh auto --train.remat auto --train.microbatches auto --train.steps"
    for devices, steps in (8, 2), (2, 4):
        code, out, err = train(tmp_path, f"{options} {steps} --fake-devices {devices}")
        assert code == 0, err
        assert f"the fastest that fits {devices} x cpu (planned as h100)" in out
        saved = json.loads((tmp_path / "config.json").read_text())
        assert math.prod(saved["mesh"].values()) == devices
        assert saved["train"]["remat"] != "auto" and saved["train"]["microbatches"] >= 1
    assert f"resumed from {tmp_path}/checkpoints/2" in out
    assert [row["step"] for row in step_rows(tmp_path)] == [1, 2, 3, 4]


# test_manager.py refuses it in this process, and test_command_line.py has what an error looks like.
@pytest.mark.wide
def test_another_model_in_the_same_run_directory_is_refused_in_a_few_lines(trained):
    folder, code, _, err = trained
    assert code == 0, err
    code, _, err = train(folder, "--fake-devices 2 --mesh fsdp=2 --model.d-ff 128")
    assert code == 2
    assert "model.d_ff: saved 64, now 128" in err and "Traceback" not in err


@pytest.mark.wide
def test_a_run_that_diverges_ends_with_exit_code_3(tmp_path):
    # The first update is so large that no later loss is finite.
    code, _, err = train(tmp_path, "--fake-devices 1 --optim.lr 1e38 --train.steps 20")
    assert code == 3, err
    assert (
        err.startswith("error: ")
        and " in 10 steps in a row up to step " in err
        and "Traceback" not in err
    )
    assert [row["skipped"] for row in step_rows(tmp_path)][-10:] == [True] * 10


@pytest.mark.wide
def test_sigterm_ends_the_command_with_exit_code_0(tmp_path):
    process = start(tmp_path, "--fake-devices 1 --train.steps 1000000")
    try:
        assert any(line.startswith("step 1/") for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "stopped by SIGTERM" in out and "a sample" not in out
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1
