"""A run as a process continues on other devices."""

import json
import math
import subprocess
import sys

from tests.runs import step_rows

TINY = (
    "--model.num-layers 2 --model.d-model 32 --model.d-ff 64 --model.head-dim 4 "
    "--data.seq-len 64 --train.global-batch 8"
)


def train(run_dir, options):
    """Exit code, stdout and stderr of a run that ends by itself."""
    words = ["-m", "ultrascale_jax", "train", "debug", *options.split()]
    words = [sys.executable, *words, "--log.run-dir", str(run_dir)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_the_same_command_chooses_again_and_continues_on_other_devices(tmp_path):
    options = f"{TINY} --mesh auto --train.remat auto --train.microbatches auto --train.steps"
    for devices, steps in (8, 2), (2, 4):
        code, out, err = train(tmp_path, f"{options} {steps} --fake-devices {devices}")
        assert code == 0, err
        assert f"the fastest that fits {devices} x cpu (planned as h100)" in out
        saved = json.loads((tmp_path / "config.json").read_text())
        assert math.prod(saved["mesh"].values()) == devices
        assert saved["train"]["remat"] != "auto" and saved["train"]["microbatches"] >= 1
    assert f"resumed from {tmp_path}/checkpoints/2" in out
    # And in a pipeline.
    options = f"{TINY} --fake-devices 2 --mesh pp=2 --train.microbatches 2 --train.steps 5"
    code, out, err = train(tmp_path, options)
    assert code == 0, err
    assert "pipeline 1f1b: 2 ranks x 1 stage, 2 micro-batches; bubble: formula 50.0%" in out
    assert "changed since: train.steps: saved 4, now 5" in out
    assert "learning rate of update 5: 3.00e-04, by the saved settings " in out
    assert [row["step"] for row in step_rows(tmp_path)] == [1, 2, 3, 4, 5]
    code, _, err = train(tmp_path, f"{TINY} --fake-devices 2 --mesh fsdp=2 --model.d-ff 128")
    assert code == 2
    assert "model.d_ff: saved 64, now 128" in err and "Traceback" not in err
