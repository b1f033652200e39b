"""A run whose tokens and checkpoints are in a bucket, on a real S3 server, outlives its machine."""

import json
import shutil
import subprocess

import numpy as np
import pytest

from tests import s3
from tests.processes import python
from tests.runs import step_rows
from ultrascale_jax.checkpoint.copies import Copies
from ultrascale_jax.storage.remote import Remote

WORDS = ["the", "loss", "of", "a", "run", "is", "what", "it", "learns", "from"]


@pytest.fixture
def url(s3_server, tmp_path):
    return f"s3://{s3.BUCKET}/{tmp_path.name}"


def losses(folder):
    return {row["step"]: row["loss"] for row in step_rows(folder)}


def finished(name, *words, code=0, **variables):
    """Run a command of the package, which ends with `code`, and return its output."""
    with python(
        "-m", "ultrascale_jax", name, *words, stderr=subprocess.STDOUT, env=variables
    ) as run:
        output = run.communicate(timeout=300)[0]
    assert run.returncode == code, output
    return output


def test_tokens_and_checkpoints_in_a_bucket_outlive_a_machine(url, tmp_path):
    """Prepare, train, kill -9, lose the disk, go on: bit for bit on the same mesh, to 1e-6 on another."""
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": " ".join(rng.choice(WORDS, 60))}) for _ in range(200)]
    Remote(url).write("text/a.jsonl", "\n".join(lines).encode())
    words = ["--input", f"{url}/text/*.jsonl", "--out", f"{url}/tokens", "--workers", 1]
    finished("prepare-data", *words, "--shard-tokens", 20000)
    options = [
        *("--fake-devices", 8, "--model.vocab-size", 256),
        *("--data.source", f"tokens:{url}/tokens", "--train.steps", 10, "--checkpoint.every", 2),
    ]

    def train(name, mesh, store, code=0, **faults):
        places = ["--log.run-dir", tmp_path / name, "--checkpoint.store", f"{url}/{store}"]
        recipe = "tests.faults.faulty" if faults else "tests.faults.tiny"
        return finished("train", recipe, *options, "--mesh", mesh, *places, code=code, **faults)

    train("whole", "fsdp=8", "whole")
    # A run that is told to stop waits for its last copy; one that is killed has those that were made by then.
    for fault, code in (("term@4@0", 0), ("kill@8@0", -9)):
        train("run", "fsdp=8", "run", code, FAULTS=fault, FAULTY_RECIPE="tests.faults.tiny")
    before = losses(tmp_path / "run")
    last = max(Copies(f"{url}/run").steps())
    assert 4 <= last <= 6
    s3.client().copy(f"{url}/run"[5:], f"{url}/other"[5:], recursive=True)
    for path in (tmp_path / "run").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    assert f"from {url}/run" in train("run", "fsdp=8", "run")
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
    first.check_ends(0, 0)
    losses, copies = first.losses(), Copies(f"{url}/run")
    # Uploads may be slower than these steps; the last one is always waited for.
    assert copies.steps()[-1] == 12
    shutil.rmtree(tmp_path / "run")
    copies.fetch_beside(tmp_path / "run")
    again = job(tmp_path / "run", *options)
    assert "fetching the checkpoint of step 12" in again.check_ends(0, 0)
    assert again.losses() == losses and "fetching the checkpoint" not in again.outputs[1]


def test_a_run_that_began_with_another_needs_it_no_more(url, tmp_path):
    def train(name, *words):
        options = ("tests.faults.tiny", "--fake-devices", 2, "--checkpoint.every", 0)
        return finished("train", *options, "--log.run-dir", tmp_path / name, *words)

    train("first", "--train.steps", 2)
    places = ["--train.init-from", tmp_path / "first", "--checkpoint.store", f"{url}/run"]
    train("second", *places, "--train.steps", 2)
    shutil.rmtree(tmp_path / "first")
    shutil.rmtree(tmp_path / "second")
    out = train("second", *places, "--train.steps", 4)
    assert "fetching the checkpoint of step 2" in out
    assert [row["step"] for row in step_rows(tmp_path / "second")] == [1, 2, 3, 4]
