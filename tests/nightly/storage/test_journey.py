"""A run whose tokens and checkpoints are in a bucket, on a real S3 server, outlives its machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import s3
from tests.faults.conftest import job as job  # a fixture
from tests.runs import step_rows
from ultrascale_jax.checkpoint.copies import Copies
from ultrascale_jax.storage.remote import Remote

ROOT = Path(__file__).parents[2]
WORDS = ["the", "loss", "of", "a", "run", "is", "what", "it", "learns", "from"]


@pytest.fixture
def url(s3_server, tmp_path):
    return f"s3://{s3.BUCKET}/{tmp_path.name}"


def losses(folder):
    return {row["step"]: row["loss"] for row in step_rows(folder)}


def command(name, *arguments):
    return [sys.executable, "-m", "ultrascale_jax", name, *map(str, arguments)]


def finished(words, environment, code=0):
    """The output of a command, which ends with `code`."""
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_tokens_and_checkpoints_in_a_bucket_outlive_a_machine(url, s3_server, tmp_path):
    """Prepare, train, kill -9, lose the disk, go on: bit for bit on the same mesh, to 1e-6 on another."""
    environment = os.environ | s3_server
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": " ".join(rng.choice(WORDS, 60))}) for _ in range(200)]
    Remote(url).write("text/a.jsonl", "\n".join(lines).encode())
    words = ["--input", f"{url}/text/*.jsonl", "--out", f"{url}/tokens", "--workers", 1]
    finished(command("prepare-data", *words, "--shard-tokens", 20000), environment)
    options = [
        *("--fake-devices", 8, "--model.vocab-size", 256),
        *("--data.source", f"tokens:{url}/tokens", "--train.steps", 10, "--checkpoint.every", 2),
    ]

    def train(name, mesh, store, code=0, **more):
        folder, store = tmp_path / name, f"{url}/{store}"
        own = ["--mesh", mesh, "--log.run-dir", folder, "--checkpoint.store", store]
        recipe = "tests.faults.faulty" if more else "tests.faults.tiny"
        return finished(command("train", recipe, *options, *own), environment | more, code)

    train("whole", "fsdp=8", "whole")
    train("run", "fsdp=8", "run", -9, FAULTS="kill@8@0", FAULTY_RECIPE="tests.faults.tiny")
    before = losses(tmp_path / "run")
    last = max(Copies(f"{url}/run").steps())
    assert 2 <= last <= 6
    s3.client().copy(f"{url}/run"[5:], f"{url}/other"[5:], recursive=True)
    for path in (tmp_path / "run").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    # The lock of the dead process is there: in the same folder, though it is empty, it is seen to be gone.
    out = train("run", "fsdp=8", "run")
    assert f"from {url}/run" in out and f"took over {url}/run/lock from pid" in out
    whole, again = losses(tmp_path / "whole"), losses(tmp_path / "run")
    assert again == whole and set(again) == set(range(1, 11)), "metrics came back too"
    assert {step: before[step] for step in range(1, 7)} == {
        step: whole[step] for step in range(1, 7)
    }

    train("other", "dp=2,fsdp=2,tp=2", "other")
    moved = losses(tmp_path / "other")
    for step in range(last + 1, 11):
        assert moved[step] == pytest.approx(whole[step], rel=1e-6)


def test_several_processes_share_one_place_and_fetch_together(job, url, tmp_path):
    options = ("--checkpoint.store", f"{url}/run")
    first = job(tmp_path / "run", *options)
    assert first.wait() == [0, 0], first.outputs
    losses, copies = first.losses(), Copies(f"{url}/run")
    # Uploads may be slower than these steps; the last one is always waited for.
    assert copies.steps()[-1] == 12
    shutil.rmtree(tmp_path / "run")
    copies.fetch_beside(tmp_path / "run")
    again = job(tmp_path / "run", *options)
    assert again.wait() == [0, 0], again.outputs
    assert "fetching the checkpoint of step 12" in again.outputs[0] and again.losses() == losses
    assert "fetching the checkpoint" not in again.outputs[1]


def test_a_run_that_began_with_another_needs_it_no_more(url, s3_server, tmp_path):
    environment = os.environ | s3_server
    options = ["tests.faults.tiny", "--fake-devices", 2, "--checkpoint.every", 0]

    def train(name, *more):
        words = command("train", *options, "--log.run-dir", tmp_path / name, *more)
        return finished(words, environment)

    train("first", "--train.steps", 2)
    own = ["--train.init-from", tmp_path / "first", "--checkpoint.store", f"{url}/run"]
    train("second", *own, "--train.steps", 2)
    shutil.rmtree(tmp_path / "first")
    shutil.rmtree(tmp_path / "second")
    out = train("second", *own, "--train.steps", 4)
    assert "fetching the checkpoint of step 2" in out
    assert [row["step"] for row in step_rows(tmp_path / "second")] == [1, 2, 3, 4]
