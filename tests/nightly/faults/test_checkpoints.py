"""Checkpoints under real faults: kills at any instant, damaged files, two jobs in one place."""

import os
import random
import signal

import pytest

from tests.checkpoints import array_files, flip
from tests.faults.corruptions import check_outcomes
from tests.faults.saver import check_newest
from tests.processes import wait_for
from ultrascale_jax.checkpoint.step_dirs import steps
from ultrascale_jax.launch.run_lock import run_lock


@pytest.mark.parametrize(
    ("seed", "kills", "longest", "keep"),
    [
        # Row 7: spread over several saves, in one folder.
        (7, 20, 0.4, 3),
        # Row 8: only one is kept, so each save deletes the one before it.
        (8, 30, 0.3, 1),
    ],
)
def test_a_kill_at_any_moment_of_a_save_leaves_a_newest_that_loads_bit_for_bit(
    tmp_path, killed, seed, kills, longest, keep
):
    rng, newest = random.Random(seed), []
    for _ in range(kills):
        killed(tmp_path, rng.uniform(0, longest), keep)
        newest.append(check_newest(tmp_path, keep))
    assert newest[0] > 0 and newest == sorted(set(newest))


@pytest.mark.parametrize("first", range(0, 150, 50))
def test_damage_is_skipped_loudly_or_refused_in_a_line(tmp_path, first):
    """Row 9."""
    check_outcomes(tmp_path, range(first, first + 50))


def flip_arrays(place):
    path = array_files(place)[0]
    flip(path, path.stat().st_size // 2)


def test_a_checkpoint_that_is_damaged_changed_or_taken_is_refused_and_the_run_goes_on_bit_for_bit(
    job, tmp_path
):
    """Rows 9, 10, 14 and 27, with two processes and with one."""
    folder = tmp_path / "run"
    first = job(folder)
    first.check_ends(0, 0)
    assert first.checkpoints() == [4, 8, 12]
    losses = first.losses()

    flip_arrays(folder / "checkpoints/12")
    second = job(folder)
    output = second.check_ends(0, 0)
    assert "SKIPPED CHECKPOINT of step 12" in output and "resumed from " in output
    assert "SKIPPED" not in second.outputs[1]
    assert second.losses() == losses
    [event] = second.events("quarantined")
    assert (event["step"], event["name"]) == (12, "12.corrupt")
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["12", "12.corrupt", "4", "8"]

    alone = {"processes": 1, "devices": 2}
    changed = job(folder, "--data.seq-len", "16", "--optim.name", "muon", **alone).check_ends(2)
    assert "data.seq_len: saved 32, now 16" in changed
    assert "optim.name: saved 'adamw', now 'muon'" in changed
    assert "--checkpoint.allow-change" not in changed  # Muon's state has other arrays

    with run_lock(folder):
        assert f"is in use by pid {os.getpid()} " in job(folder, **alone).check_ends(2)

    for step in steps(folder / "checkpoints"):
        flip_arrays(folder / f"checkpoints/{step}")
    nothing = job(folder, **alone).check_ends(70)
    assert "no checkpoint in " in nothing and "of step 12: " in nothing
    assert steps(folder / "checkpoints") == [4, 8, 12]


def test_two_processes_whose_folder_vanishes_count_alike_and_end_together(job, tmp_path):
    """Row 12: after three in a row, with the cause."""
    folder = tmp_path / "run"
    running = job(folder, "--train.steps", "100000", "--checkpoint.every", "50")
    wait_for(lambda: running.events("saved"), *running.processes)
    (folder / "checkpoints").rename(folder / "away")
    (folder / "checkpoints").touch()
    assert "3 in a row" in running.check_ends(70, 70)
    assert {row["rank"] for row in running.events("save_failed")} == {0, 1}


def test_two_jobs_of_two_processes_do_not_share_a_folder(job, tmp_path):
    """Row 27: both ranks of the second learn that the first runs, which goes on undisturbed."""
    folder = tmp_path / "run"
    first = job(folder, "--train.steps", "100000")
    lock = folder / "lock"
    wait_for(lambda: lock.exists() and lock.read_bytes(), *first.processes)
    second = job(folder).check_ends(2, 2)
    assert f"is in use by pid {first.processes[0].pid} " in second
    # Before its first step it would have nothing to save.
    wait_for(first.losses, *first.processes)
    first.processes[0].send_signal(signal.SIGTERM)
    first.check_ends(0, 0)
    assert lock.read_bytes() == b"" and len(first.checkpoints()) > 0


def test_one_host_that_is_at_fault_costs_no_checkpoint(job, tmp_path):
    """Row 9: all processes load the same one or none, and nothing that is good is put aside."""
    folder = tmp_path / "run"
    job(folder).check_ends(0, 0)
    good = folder / "checkpoints"
    for fault, code, words in (
        ("stale", 0, f"resumed from {good / '12'}"),
        ("unreadable", 70, "cannot be read"),
        ("full", 70, "RESOURCE_EXHAUSTED"),
    ):
        run = job(folder, module="tests.faults.bad_host", BAD_HOST=fault)
        assert words in run.check_ends(code, code)
    assert sorted(path.name for path in good.iterdir()) == ["12", "4", "8"]
