"""Disks that are full, gone or do not answer while a run saves; `test_disks.py` runs this where it may mount."""

import dataclasses
import os
import signal
import subprocess
import time

import pytest

from tests.checkpoints import BASE, state_of
from tests.runs import change, in_folder
from ultrascale_jax.checkpoint import saving
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.run_metadata import describe
from ultrascale_jax.checkpoint.step_dirs import files, metadata, steps
from ultrascale_jax.config import CheckpointConfig, UserError
from ultrascale_jax.launch.events import read_events
from ultrascale_jax.launch.failures import NotNow
from ultrascale_jax.training.metrics import RunLog, read_rows

WIDER = change(BASE, model={"vocab_size": 256, "d_model": 64, "d_ff": 256, "num_layers": 4})
"""Checkpoints of megabytes, which fill a disk."""


def meta(step):
    return describe(WIDER, step, "data-1")


@pytest.fixture(scope="module")
def state():
    return state_of(0, WIDER)


def command(*words, **options):
    return subprocess.run([*map(str, words)], check=True, timeout=300, **options)


def fill(folder):
    """Fill a disk; return the file that does."""
    ballast = folder / "ballast"
    with pytest.raises(OSError, match="No space"), open(ballast, "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return ballast


def mounted(tmp_path, *words):
    """`tmp_path/run/checkpoints` as a file system of its own, until the test ends."""
    folder = tmp_path / "run/checkpoints"
    folder.mkdir(parents=True)
    command("mount", *words, folder)
    return folder


@pytest.fixture
def small_disk(tmp_path):
    folder = mounted(tmp_path, "-t", "tmpfs", "-o", "size=36m", "tmpfs")
    yield folder
    command("umount", folder)


@pytest.fixture
def freezable_disk(tmp_path):
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    command("mkfs.ext4", "-q", image)
    folder = mounted(tmp_path, "-o", "loop", image)
    # A process that writes to a frozen disk cannot even be killed: whatever happens, it thaws.
    thaw = subprocess.Popen(
        ["sh", "-c", f"sleep 60; fsfreeze -u '{folder}'"], start_new_session=True
    )
    yield folder
    os.killpg(thaw.pid, signal.SIGKILL)
    thaw.wait(timeout=300)
    subprocess.run(["fsfreeze", "-u", str(folder)], capture_output=True, timeout=300)
    command("umount", folder)


def test_a_full_disk_is_told_in_a_line_each_and_the_next_good_save_works(
    state, tmp_path, small_disk, capfd
):
    """Row 11."""
    run = tmp_path / "run"
    cfg = change(in_folder(WIDER, run), checkpoint={"keep": 10})
    with Checkpoints(cfg) as checkpoints:
        checkpoints.save(state, meta(1), wait=True)
        ballast = fill(small_disk)
        capfd.readouterr()
        checkpoints.save(state, meta(2))
        checkpoints.save(state, meta(3))
        ballast.unlink()
        checkpoints.save(state, meta(4), wait=True)
        assert checkpoints.latest == 4
    told = capfd.readouterr()
    assert told.err == ""
    lines = told.out.splitlines()
    assert len(lines) == 2 and all("No space left" in line for line in lines), lines
    assert "step 2 failed (1 of 3 in a row)" in lines[0] and "step 3 failed (2 of 3" in lines[1]
    failed = [row["step"] for row in read_events(run) if row["kind"] == "save_failed"]
    assert failed == [2, 3]
    assert steps(small_disk) == [1, 4]
    assert files(small_disk / "1") and metadata(small_disk / "4")["data"]["step"] == 4


def test_metrics_wait_for_room_on_a_full_disk(small_disk, capsys):
    """Row 11, where the run directory itself is on that disk."""
    with RunLog(small_disk / "run", first_step=0, num_steps=9) as log:
        log._record({"step": 1})
        ballast = fill(small_disk)
        numbers = dict.fromkeys(map(str, range(50)), 1.0)
        rows = [{"step": n, **numbers} for n in range(2, 40)]
        for row in rows:
            log._record(row)
        ballast.unlink()
        log._record({"step": 40})
    assert read_rows(small_disk / "run/metrics.jsonl") == [{"step": 1}, *rows, {"step": 40}]
    assert capsys.readouterr().out.count("metrics wait to be written") == 1


def test_an_old_checkpoint_that_cannot_be_deleted_fails_no_save(state, tmp_path, capfd):
    cfg = dataclasses.replace(in_folder(WIDER, tmp_path), checkpoint=CheckpointConfig(keep=1))
    folder = tmp_path / "checkpoints"
    with Checkpoints(cfg) as checkpoints:
        checkpoints.save(state, meta(1), wait=True)
        command("mount", "-t", "tmpfs", "tmpfs", folder / "1/params")
        try:
            for step in (2, 3):
                checkpoints.save(state, meta(step), wait=True)
            assert files(folder / "3") and steps(folder) == [3]
            assert capfd.readouterr().out.count(f"the old checkpoint {folder / '1'} stays: ") == 1
            saving.sweep(folder)
        finally:
            [old] = folder.glob("1*/params")
            command("umount", old)
    saving.sweep(folder)
    assert [path.name for path in folder.iterdir()] == ["3"]


def test_a_disk_that_was_unmounted_is_not_mistaken_for_the_folder_below(
    state, tmp_path, small_disk
):
    """Row 12."""
    with Checkpoints(in_folder(WIDER, tmp_path / "run")) as checkpoints:
        command("umount", small_disk)
        try:
            with pytest.raises(NotNow, match=r"on another disk than it was: is it unmounted\?"):
                checkpoints.save(state, meta(1), wait=True)
            assert list(small_disk.iterdir()) == []
        finally:
            command("mount", "-t", "tmpfs", "tmpfs", small_disk)


def test_a_disk_that_does_not_answer_is_told_and_bounded(state, tmp_path, freezable_disk, capsys):
    """Row 12: it is frozen while a checkpoint is written, and thaws after a minute, before which all is told."""
    with Checkpoints(in_folder(WIDER, tmp_path / "run"), stall_s=2.0) as checkpoints:
        checkpoints.save(state, meta(1), wait=True)
        checkpoints.save(state, meta(2))
        command("fsfreeze", "-f", freezable_disk)
        try:
            checkpoints.save(state, meta(3))
            checkpoints.save(state, meta(4))
            with pytest.raises(NotNow, match="is still being written after"):
                checkpoints.save(state, meta(5))
        finally:
            command("fsfreeze", "-u", freezable_disk)
        out = capsys.readouterr().out
        assert "step 2 failed (1 of 3 in a row)" in out and "is still being written after" in out
        until = time.monotonic() + 60
        while checkpoints._saving is not None and checkpoints._saving.alive:
            assert time.monotonic() < until
            time.sleep(0.05)
        checkpoints.save(state, meta(6), wait=True)
        assert checkpoints.latest == 6


def test_a_disk_that_is_read_only_is_refused_at_once(tmp_path, small_disk):
    """Row 12."""
    command("mount", "-o", "remount,ro", small_disk)
    with pytest.raises(UserError, match=r"cannot write in .*Read-only file system"):
        Checkpoints(in_folder(WIDER, tmp_path / "run"))


@pytest.mark.parametrize(("supervised", "code"), [(True, 70), (False, 2)])
def test_a_disk_that_is_full_at_a_restart_is_tried_again(
    tmp_path, monkeypatch, small_disk, supervised, code
):
    """Row 11: a supervisor gives up for ever after exit code 2."""
    if supervised:
        monkeypatch.setenv("ULTRASCALE_ATTEMPT", "1")
    fill(small_disk)
    with pytest.raises(UserError, match="No space left") as refused:
        Checkpoints(in_folder(WIDER, tmp_path / "run"))
    assert refused.value.exit_code == code
