"""Wrong numbers, bad data and another cluster: what a job of real processes does."""

import json
import shutil
import socket

import numpy as np

from ultrascale_jax.launch.exit_codes import CRASHED, STOPPED

# At the recipe's own rate training itself makes 1e-3 of the last bit within 50 steps.
LONG = (
    *("--train.steps", "60", "--optim.lr", "1e-3"),
    *("--checkpoint.every", "10", "--checkpoint.keep", "9"),
)
GUARDED = ("--watch.spike-sigma", "40", "--watch.spike-window", "4")


def test_wrong_numbers_are_skipped_and_the_run_goes_on_elsewhere(job, tmp_path):
    """Rows 13, 16 and 17: two processes skip a step that is not finite and one that leaps; one process goes on with the
    same batches and, in another pipeline, mesh and ZeRO stage, the same losses.

    Grain reads in threads, whose number no order depends on: there are no worker processes to change.
    """
    two = job(tmp_path / "two", *LONG, *GUARDED, fault="nan@4@1,spike@9@-1")
    two.check_ends(0, 0)
    steps = two.steps()
    assert [step for step, row in steps.items() if row["skipped"]] == [4, 9]
    assert not steps[4]["spike"] and steps[9]["spike"]
    skipped = two.events("skipped")
    assert [(event["step"], event["reason"], event["rows"]) for event in skipped] == [
        (4, "not finite", [24, 32]),
        (9, "spike", [64, 72]),
    ]
    assert [event["batch_hash"] for event in skipped] == [steps[n]["batch_hash"] for n in (4, 9)]

    shutil.copytree(two.run_dir, tmp_path / "one")
    for step in two.checkpoints():
        if step > 10:
            shutil.rmtree(tmp_path / f"one/checkpoints/{step}")
    elsewhere = ("--mesh", "pp=2,dp=2", "--train.microbatches", "4", "--train.zero", "0")
    one = job(tmp_path / "one", *LONG, *GUARDED, *elsewhere, processes=1, devices=4)
    assert f"resumed from {tmp_path / 'one/checkpoints/10'}" in one.check_ends(0)
    again = one.steps()
    hashes = [{step: row["batch_hash"] for step, row in rows.items()} for rows in (again, steps)]
    assert hashes[0] == hashes[1] and len(again) == 60
    losses = [[rows[step]["loss"] for step in range(11, 61)] for rows in (again, steps)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert not any(again[step]["skipped"] for step in range(11, 61))


def test_a_job_that_only_skips_stops_for_good(job, tmp_path):
    """Row 16: ten in a row, on both processes, with the batches written down."""
    faults = ",".join(f"nan@{step}@1" for step in range(5, 15))
    diverging = job(tmp_path / "run", "--train.steps", "20", fault=faults)
    output = diverging.check_ends(STOPPED, STOPPED)
    assert "not finite in 10 steps in a row up to step 14" in output
    kept = json.loads((tmp_path / "run/skipped.json").read_text())
    expected = [(step, 8) for step in range(5, 15)]
    assert [(row["step"], len(row["places"])) for row in kept] == expected
    assert diverging.checkpoints() == [4]


def test_a_flipped_bit_of_one_copy_ends_the_job_and_names_the_device(job, tmp_path):
    """Row 18."""
    words = ("--mesh", "dp=4", "--watch.replicas-every", "2")
    faulty = job(tmp_path / "run", *words, fault="flip@5@1")
    output = faulty.check_ends(CRASHED, CRASHED)
    [event] = faulty.events("replicas")
    [device] = event["devices"]
    assert (event["step"], event["certain"]) == (6, True)
    assert (device["process"], device["host"]) == (1, socket.gethostname())
    assert device["arrays"] == ["params.final_norm"]
    assert "copies of the state are not equal after step 6" in output
    assert faulty.checkpoints() == [4]

    sound = job(tmp_path / "sound", *words)
    again = job(tmp_path / "run", *words, fault="flip@5@1")
    again.check_ends(0, 0)
    sound.check_ends(0, 0)
    assert again.losses() == sound.losses()


def test_a_fault_of_one_rank_that_does_not_come_back_leaves_no_trace(job, tmp_path, undisturbed):
    """Row 18: with `watch.rerun` the step is taken again, and the second result is that of a sound job."""
    rerun = job(tmp_path / "run", "--watch.rerun", fault="nan@6@1")
    rerun.check_ends(0, 0)
    [event] = rerun.events("rerun")
    assert (event["step"], event["verdict"], event["skipped"]) == (6, "transient", [True, False])
    assert rerun.losses() == undisturbed


def test_a_loader_that_raises_on_one_rank_ends_the_job_with_its_reason(job, tmp_path, undisturbed):
    """Row 20."""
    faulty = job(tmp_path / "run", fault="loader@6@1")
    codes = faulty.wait()
    assert CRASHED in codes and 0 not in codes
    words = "data.source='synthetic': step 6 cannot be read: [Errno 5] fault on purpose"
    assert words in faulty.outputs[0]
    again = job(tmp_path / "run", fault="loader@6@1")
    again.check_ends(0, 0)
    assert again.losses() == undisturbed
