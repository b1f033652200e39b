"""Wrong numbers, bad data and another cluster: what a job of real processes does."""

import json
import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.corpora import save_index
from tests.faults.conftest import LIMIT_S, RECIPE, ROOT, environment
from ultrascale_jax.data.shards import write_shard
from ultrascale_jax.data.tokenizer import ByteTokenizer
from ultrascale_jax.launch.events import read_events
from ultrascale_jax.launch.exit_codes import CRASHED, REFUSED, STOPPED

# At the recipe's own rate training itself makes 1e-3 of the last bit within 50 steps.
LONG = (
    *("--train.steps", "60", "--optim.lr", "1e-3"),
    *("--checkpoint.every", "10", "--checkpoint.keep", "9"),
)
GUARDED = ("--watch.spike-sigma", "40", "--watch.spike-window", "4")


def steps_of(job):
    """Rows of the steps, by step."""
    return {row["step"]: row for row in job.rows() if "grad_norm" in row or "lr" in row}


def events_of(job, kind):
    return [event for event in read_events(job.run_dir) if event["kind"] == kind]


@pytest.mark.faults
def test_wrong_numbers_are_skipped_and_the_run_goes_on_elsewhere(job, tmp_path):
    """Rows 13, 16 and 17: two processes skip what is not finite and what leaps; one process goes on with the same
    batches and, in another pipeline, mesh and ZeRO stage, the same losses.

    Grain reads in threads, whose number no order depends on: there are no worker processes to change.
    """
    two = job(tmp_path / "two", *LONG, *GUARDED, fault="nan@4@1,spike@9@-1")
    assert two.wait() == [0, 0], two.outputs
    steps = steps_of(two)
    assert [step for step, row in steps.items() if row["skipped"]] == [4, 9]
    assert not steps[4]["spike"] and steps[9]["spike"]
    skipped = [(e["step"], e["reason"], e["rows"]) for e in events_of(two, "skipped")]
    assert skipped == [(4, "not finite", [24, 32]), (9, "spike", [64, 72])]
    assert [e["batch_hash"] for e in events_of(two, "skipped")] == [
        steps[step]["batch_hash"] for step in (4, 9)
    ]

    shutil.copytree(two.run_dir, tmp_path / "one")
    for path in (tmp_path / "one/checkpoints").iterdir():
        if path.name.isdecimal() and int(path.name) > 10:
            shutil.rmtree(path)
    elsewhere = ("--mesh", "pp=2,dp=2", "--train.microbatches", "4")
    words = (*LONG, *GUARDED, *elsewhere, "--train.zero", "0")
    one = job(tmp_path / "one", *words, processes=1, devices=4)
    assert one.wait() == [0], one.outputs
    assert f"resumed from {tmp_path / 'one/checkpoints/10'}" in one.outputs[0]
    assert one.hashes() == two.hashes() and len(one.hashes()) >= 58
    again = steps_of(one)
    losses = [[rows[step]["loss"] for step in range(11, 61)] for rows in (again, steps)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert not any(again[step]["skipped"] for step in range(11, 61))


@pytest.mark.faults
def test_a_job_that_only_skips_stops_for_good(job, tmp_path):
    """Row 16: k in a row, on both processes, with the batches written down."""
    faults = ",".join(f"nan@{step}@1" for step in range(5, 15))
    diverging = job(tmp_path / "run", "--train.steps", "20", fault=faults)
    assert diverging.wait() == [STOPPED, STOPPED], diverging.outputs
    assert "not finite in 10 steps in a row up to step 14" in diverging.outputs[0]
    kept = json.loads((tmp_path / "run/skipped.json").read_text())
    assert [(row["step"], len(row["places"])) for row in kept] == [
        (step, 8) for step in range(5, 15)
    ]
    assert diverging.checkpoints() == [4]


@pytest.mark.faults
def test_a_flipped_bit_of_one_copy_ends_the_job_and_names_the_device(job, tmp_path):
    """Row 18."""
    words = ("--mesh", "dp=4", "--watch.replicas-every", "2")
    faulty = job(tmp_path / "run", *words, fault="flip@5@1")
    assert faulty.wait() == [CRASHED, CRASHED], faulty.outputs
    [event] = events_of(faulty, "replicas")
    [device] = event["devices"]
    assert (event["step"], event["certain"]) == (6, True)
    assert (device["process"], device["host"]) == (1, socket.gethostname())
    assert device["arrays"] == ["params.final_norm"]
    assert "copies of the state are not equal after step 6" in faulty.outputs[0]
    assert faulty.checkpoints() == [4]

    sound = job(tmp_path / "sound", *words)
    again = job(tmp_path / "run", *words, fault="flip@5@1")
    assert [*again.wait(), *sound.wait()] == [0] * 4, again.outputs
    assert again.losses() == sound.losses()


@pytest.mark.faults
def test_a_fault_of_one_rank_that_does_not_come_back_leaves_no_trace(job, tmp_path, undisturbed):
    """Row 18: with `watch.rerun` the step is taken again, and the second result is that of a sound job."""
    words = ("--watch.rerun",)
    rerun = job(tmp_path / "run", *words, fault="nan@6@1")
    assert rerun.wait() == [0, 0], rerun.outputs
    [event] = events_of(rerun, "rerun")
    assert (event["step"], event["verdict"], event["skipped"]) == (6, "transient", [True, False])
    losses = {row["step"]: row["loss"].hex() for row in undisturbed["rows"]}
    assert rerun.losses() == losses


@pytest.mark.faults
def test_a_loader_that_raises_on_one_rank_ends_the_job_with_its_reason(job, tmp_path, undisturbed):
    """Row 20."""
    faulty = job(tmp_path / "run", fault="loader@6@1")
    assert CRASHED in faulty.wait() and 0 not in [run.returncode for run in faulty.processes]
    said = (
        "data.source='synthetic': step 6 cannot be read: [Errno 5] fault on purpose in the loader"
    )
    assert said in faulty.outputs[1]
    again = job(tmp_path / "run", fault="loader@6@1")
    assert again.wait() == [0, 0], again.outputs
    losses = {row["step"]: row["loss"].hex() for row in undisturbed["rows"]}
    assert again.losses() == losses


@pytest.mark.slow
def test_damaged_shards_are_refused_by_name_before_anything_is_compiled(tmp_path):
    """Rows 15 and 20: one line, and the code that no supervisor restarts."""
    folder, rng = tmp_path / "tokens", np.random.default_rng(0)
    folder.mkdir()
    tokens = [rng.integers(0, 64, size=50).astype(np.uint16) for _ in range(20)]
    lengths, hashes = np.full(20, 50), np.arange(20, dtype=np.uint64)
    shard = write_shard(folder, 0, tokens, lengths, hashes)
    fields = {"dtype": "uint16", "tokenizer": ByteTokenizer.fingerprint, "vocab_size": 64}
    save_index(folder, [shard], **fields)
    os.truncate(folder / "shard_00000.tokens", 1001)
    words = ["--data.source", f"tokens:{folder}", "--log.run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.train", RECIPE, *words],
        cwd=ROOT,
        env=environment(1),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == REFUSED
    assert "shard_00000.tokens has 1001 bytes, not 2000: truncated" in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "run/checkpoints").exists()
