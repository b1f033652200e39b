"""Checkpoints under real faults: kills at any instant, damaged files, two jobs in one place."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.step_dirs import files, steps
from ultrascale_jax.launch.events import read_events
from ultrascale_jax.launch.run_lock import RunLock

ROOT = Path(__file__).parents[2]

# Forks a process for each line `DELAY FOLDER KEEP`: it saves step after step until it is killed. What is imported once
# is imported for all of them; none of them has threads when it is forked, for JAX's devices are not yet awake.
SAVER = """
import os, signal, sys
import tests.faults.saver as saver
for line in sys.stdin:
    delay, folder, keep = line.split()
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        saver.save_for_ever(folder, int(keep), lambda: os.write(writable, b"."))
        os._exit(0)
    os.read(readable, 1)
    saver.time.sleep(float(delay))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(readable), os.close(writable)
    print("killed", flush=True)
"""


@pytest.fixture
def killed():
    """`killed(folder, delay, keep)`: a process saves into `folder`, and dies `delay` s after its first save began."""
    run = subprocess.Popen(
        [sys.executable, "-c", SAVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"},
        start_new_session=True,
    )
    assert run.stdin is not None and run.stdout is not None

    def kill(folder, delay, keep):
        print(delay, folder, keep, file=run.stdin, flush=True)
        assert run.stdout.readline() == "killed\n"

    try:
        yield kill
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate(timeout=30)


def check_newest(folder, keep):
    """Check that a killed process's checkpoint loads bit for bit, and that nothing half done stays."""
    from tests.faults import saver

    cfg = saver.config(folder, keep)
    mesh = saver.mesh()
    with Checkpoints(cfg) as checkpoints:
        found = checkpoints.resume(saver.abstract(cfg, mesh), lambda meta, place: [])
        if found is None:
            return 0
        state, step, _ = found
        for leaf, expected in zip(
            jax.tree.leaves(state), jax.tree.leaves(saver.state(cfg, mesh, step)), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected))
        after = saver.state(cfg, mesh, step + 1)
        checkpoints.save(after, saver.meta(cfg, step + 1), wait=True)
    left = [path.name for path in (folder / "checkpoints").iterdir()]
    assert not [name for name in left if not name.isdecimal()], left
    assert files(folder / f"checkpoints/{step + 1}")
    return step


@pytest.mark.slow
@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.faults)])
def test_a_kill_at_any_moment_of_a_save_leaves_a_newest_that_loads_bit_for_bit(
    tmp_path, killed, kills
):
    """Row 7. Random delays, spread over several saves, in one folder."""
    rng, seen = random.Random(7), set()
    for _ in range(kills):
        killed(tmp_path, rng.uniform(0, 0.4), 3)
        seen.add(check_newest(tmp_path, 3))
    assert len(seen) > kills / 2


@pytest.mark.faults
def test_a_kill_while_old_ones_are_deleted_leaves_one_that_loads(tmp_path, killed):
    """Row 8. Only one is kept, so each save deletes the one before it."""
    rng = random.Random(8)
    for _ in range(30):
        killed(tmp_path, rng.uniform(0.05, 0.3), 1)
        if steps(tmp_path / "checkpoints"):
            assert check_newest(tmp_path, 1) > 0


def flip(place):
    path = max(place.rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


@pytest.mark.faults
def test_what_is_damaged_changed_or_taken_is_refused_and_the_rest_goes_on_bit_for_bit(
    job, tmp_path
):
    """Rows 9, 10, 14 and 27, with two processes and with one."""
    folder = tmp_path / "run"
    first = job(folder)
    assert first.wait() == [0, 0], first.outputs
    assert first.checkpoints() == [4, 8, 12]
    losses = first.losses()

    flip(folder / "checkpoints/12")
    second = job(folder)
    assert second.wait() == [0, 0], second.outputs
    assert "SKIPPED CHECKPOINT of step 12" in second.outputs[0]
    assert "resumed from " in second.outputs[0] and "SKIPPED" not in second.outputs[1]
    assert second.losses() == losses
    [event] = [row for row in second.rows("events.jsonl") if row["kind"] == "quarantined"]
    assert (event["step"], event["name"]) == (12, "12.corrupt")
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == ["12", "12.corrupt", "4", "8"]

    alone = {"processes": 1, "devices": 2}
    changed = job(folder, "--data.seq-len", "16", "--optim.name", "muon", **alone)
    assert changed.wait() == [2], changed.outputs
    assert "data.seq_len: saved 32, now 16" in changed.outputs[0]
    assert "optim.name: saved 'adamw', now 'muon'" in changed.outputs[0]
    assert "--checkpoint.allow-change" not in changed.outputs[0]  # Muon's state has other arrays

    with RunLock(folder):
        refused = job(folder, **alone)
        assert refused.wait() == [2], refused.outputs
    assert f"is in use by pid {os.getpid()} " in refused.outputs[0]

    for step in steps(folder / "checkpoints"):
        flip(folder / f"checkpoints/{step}")
    nothing = job(folder, **alone)
    assert nothing.wait() == [70], nothing.outputs
    assert "no checkpoint in " in nothing.outputs[0] and "of step 12: " in nothing.outputs[0]
    assert steps(folder / "checkpoints") == [4, 8, 12]


@pytest.mark.faults
def test_two_processes_whose_folder_vanishes_count_alike_and_end_together(job, tmp_path):
    """Row 12: after three in a row, with the cause."""
    folder = tmp_path / "run"
    words = ("--train.steps", "100000", "--checkpoint.every", "50")
    running = job(folder, *words)
    deadline = time.monotonic() + 100
    while not any(row["kind"] == "saved" for row in read_events(folder)):
        assert time.monotonic() < deadline and running.processes[0].poll() is None
        time.sleep(0.1)
    (folder / "checkpoints").rename(folder / "away")
    (folder / "checkpoints").touch()
    assert running.wait() == [70, 70], running.outputs
    assert "3 in a row" in running.outputs[0]
    failed = [row for row in running.rows("events.jsonl") if row["kind"] == "save_failed"]
    assert {row["rank"] for row in failed} == {0, 1}


@pytest.mark.faults
def test_two_jobs_of_two_processes_do_not_share_a_folder(job, tmp_path):
    """Row 27: both ranks of the second learn that the first runs, which goes on undisturbed."""
    folder = tmp_path / "run"
    first = job(folder, "--train.steps", "100000")
    deadline = time.monotonic() + 100
    while not (folder / "lock").exists() or not (folder / "lock").read_bytes():
        assert time.monotonic() < deadline and first.processes[0].poll() is None
        time.sleep(0.1)
    second = job(folder)
    assert second.wait() == [2, 2], second.outputs
    assert f"is in use by pid {first.processes[0].pid} " in second.outputs[0]
    # Before its first step it would have nothing to save.
    while not first.losses():
        assert time.monotonic() < deadline and first.processes[0].poll() is None
        time.sleep(0.1)
    first.signal(0, signal.SIGTERM)
    assert first.wait() == [0, 0], first.outputs
    assert (folder / "lock").read_bytes() == b"" and len(first.checkpoints()) > 0


@pytest.mark.faults
def test_one_host_that_is_at_fault_costs_no_checkpoint(job, tmp_path):
    """Row 9: all processes load the same one or none, and nothing that is good is put aside."""
    folder = tmp_path / "run"
    first = job(folder)
    assert first.wait() == [0, 0], first.outputs
    good = folder / "checkpoints"

    stale = job(folder, module="tests.faults.bad_host", BAD_HOST="stale")
    assert stale.wait() == [0, 0], stale.outputs
    assert f"resumed from {good / '12'}" in stale.outputs[0]

    unread = job(folder, module="tests.faults.bad_host", BAD_HOST="unreadable")
    assert unread.wait() == [70, 70], unread.outputs
    assert "cannot be read" in unread.outputs[0] and "Input/output" in unread.outputs[0]

    full = job(folder, module="tests.faults.bad_host", BAD_HOST="full")
    assert full.wait() == [70, 70], full.outputs
    assert "RESOURCE_EXHAUSTED" in full.outputs[0]
    assert sorted(path.name for path in good.iterdir()) == ["12", "4", "8"]
