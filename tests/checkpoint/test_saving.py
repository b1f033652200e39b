"""Saves that fail: a disk that is full, gone, or does not answer never stops training by itself."""

import dataclasses
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

from tests.states import some_state
from ultrascale_jax.checkpoint import saving
from ultrascale_jax.checkpoint.manager import Checkpoints, SaveFailed
from ultrascale_jax.checkpoint.restoring import read_metadata
from ultrascale_jax.checkpoint.run_metadata import describe
from ultrascale_jax.checkpoint.step_dirs import GROUPS, STORE, Damaged, files, metadata, steps
from ultrascale_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    UserError,
)
from ultrascale_jax.launch.events import Events, read_events
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.training.metrics import RunLog, read_rows

BASE = Config(
    model=ModelConfig(
        vocab_size=256, d_model=64, d_ff=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16
    ),
    mesh=MeshConfig(fsdp=1),
    data=DataConfig(source="synthetic", seq_len=32),
    checkpoint=CheckpointConfig(keep=10),
)
UNSHARED = subprocess.run(["sh", "-c", "unshare --mount true"], capture_output=True)
needs_mount = pytest.mark.skipif(
    UNSHARED.returncode != 0, reason="this process may mount no file system"
)


def in_folder(folder):
    return dataclasses.replace(BASE, log=LogConfig(run_dir=str(folder)))


def meta(step):
    return describe(BASE, step, "data-1")


@pytest.fixture(scope="module")
def state():
    return some_state(BASE, make_mesh(BASE.mesh, jax.devices()[:1]))


@pytest.mark.slow
def test_saves_leave_no_objects_behind(tmp_path, state):
    cfg = dataclasses.replace(in_folder(tmp_path), checkpoint=CheckpointConfig(keep=2))
    blocks = {}
    with Checkpoints(cfg) as checkpoints:
        for step in range(1, 26):
            checkpoints.save(state, meta(step), wait=True)
            gc.collect()
            blocks[step] = sys.getallocatedblocks()
    arrays = len(jax.tree.leaves(state))
    assert (blocks[25] - blocks[15]) / 10 < arrays


def mounted(tmp_path, *words):
    """`tmp_path/run/checkpoints` as a file system of its own, until the test ends."""
    folder = tmp_path / "run/checkpoints"
    folder.mkdir(parents=True)
    subprocess.run(["mount", *words, str(folder)], check=True, timeout=30)
    return folder


@pytest.fixture
def small_disk(tmp_path):
    folder = mounted(tmp_path, "-t", "tmpfs", "-o", "size=36m", "tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=30)


@pytest.fixture
def freezable_disk(tmp_path):
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, timeout=30)
    folder = mounted(tmp_path, "-o", "loop", str(image))
    # A process that writes to a frozen disk cannot even be killed: whatever happens, it thaws.
    thaw = subprocess.Popen(
        ["sh", "-c", f"sleep 60; fsfreeze -u '{folder}'"], start_new_session=True
    )
    yield folder
    os.killpg(thaw.pid, signal.SIGKILL)
    thaw.wait(timeout=30)
    subprocess.run(["fsfreeze", "-u", str(folder)], capture_output=True, timeout=30)
    subprocess.run(["umount", str(folder)], check=True, timeout=30)


def failures(folder):
    return [row for row in read_events(folder) if row["kind"] == "save_failed"]


@pytest.mark.slow
@needs_mount
def test_a_full_disk_is_told_in_a_line_each_and_the_next_good_save_works(
    state, tmp_path, small_disk, capfd
):
    """Row 11."""
    with Checkpoints(in_folder(tmp_path / "run"), Events(tmp_path / "run", 0)) as checkpoints:
        checkpoints.save(state, meta(1), wait=True)
        ballast = small_disk / "ballast"
        with pytest.raises(OSError, match="No space"), open(ballast, "wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
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
    assert [row["step"] for row in failures(tmp_path / "run")] == [2, 3]
    kept = sorted(path.name for path in small_disk.iterdir() if path.name != "lost+found")
    assert kept == ["1", "4"]
    assert files(small_disk / "1") and metadata(small_disk / "4")["data"]["step"] == 4


@needs_mount
def test_metrics_wait_for_room_on_a_full_disk(small_disk, capsys):
    """Row 11, where the run directory itself is on that disk."""
    with RunLog(small_disk / "run", first_step=0, num_steps=9) as log:
        log._record({"step": 1})
        ballast = small_disk / "ballast"
        with pytest.raises(OSError, match="No space"), open(ballast, "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        numbers = dict.fromkeys(map(str, range(50)), 1.0)
        rows = [{"step": n, **numbers} for n in range(2, 40)]
        for row in rows:
            log._record(row)
        ballast.unlink()
        log._record({"step": 40})
    assert read_rows(small_disk / "run/metrics.jsonl") == [{"step": 1}, *rows, {"step": 40}]
    told = capsys.readouterr().out
    assert told.count("metrics wait to be written") == 1


VANISH = """
import contextlib, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_saving import *
state = some_state(BASE, make_mesh(BASE.mesh, jax.devices()[:1]))
for moment in ("before", "during"):
    folder = Path(sys.argv[2], moment)
    with Checkpoints(in_folder(folder)) as checkpoints:
        checkpoints.save(state, meta(1), wait=True)
        if moment == "before":
            shutil.rmtree(folder / "checkpoints")
            try:
                checkpoints.save(state, meta(2), wait=True)
            except SaveFailed as failed:
                assert "cannot write in" in str(failed) and "No such file" in str(failed), failed
            else:
                raise AssertionError("nothing failed")
            assert not (folder / "checkpoints").exists()
        else:
            checkpoints.save(state, meta(2))
            (folder / "checkpoints").rename(folder / "away")
            # TensorStore may make the folder anew, so the next one may come about.
            with contextlib.suppress(SaveFailed):
                checkpoints.save(state, meta(3), wait=True)
        (folder / "checkpoints").mkdir(exist_ok=True)
        checkpoints.save(state, meta(4), wait=True)
        assert files(folder / "checkpoints/4")
"""


@pytest.mark.slow
def test_a_folder_that_vanishes_is_told_and_no_thread_waits_for_it(tmp_path):
    """Row 12: Orbax's threads used to wait for minutes, and the process with them."""
    words = [sys.executable, "-c", VANISH, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_save_whose_arrays_no_reader_finds_is_no_checkpoint(state, tmp_path):
    with Checkpoints(in_folder(tmp_path)) as checkpoints:
        checkpoints.save(state, meta(1), wait=True)
    for name in (f"{group}/{STORE}" for group in GROUPS):
        place = tmp_path / name / "1"
        shutil.copytree(tmp_path / "checkpoints/1", place)
        (place / name).unlink()
        completed = threading.Event()
        writing = saving.Writing(place, lambda: None, None, completed.set)
        assert writing.result(60.0) == f"{name} is missing" and not completed.is_set()
        with pytest.raises(Damaged, match=f"{name} is missing"):
            read_metadata(place)


@needs_mount
def test_an_old_checkpoint_that_cannot_be_deleted_fails_no_save(state, tmp_path, capfd):
    cfg = dataclasses.replace(in_folder(tmp_path), checkpoint=CheckpointConfig(keep=1))
    folder = tmp_path / "checkpoints"
    with Checkpoints(cfg) as checkpoints:
        checkpoints.save(state, meta(1), wait=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder / "1/params")], check=True)
        try:
            for step in (2, 3):
                checkpoints.save(state, meta(step), wait=True)
            assert files(folder / "3") and steps(folder) == [3]
            assert capfd.readouterr().out.count(f"the old checkpoint {folder / '1'} stays: ") == 1
            saving.sweep(folder)
        finally:
            [mounted] = folder.glob("1*/params")
            subprocess.run(["umount", str(mounted)], check=True)
    saving.sweep(folder)
    assert [path.name for path in folder.iterdir()] == ["3"]


WAY_OUT = r"3 in a row.*cannot write.*Mend .*begins anew, as there is no checkpoint"


@pytest.mark.slow
def test_after_enough_failures_in_a_row_the_run_ends_with_the_cause_and_the_way_out(
    state, tmp_path
):
    with Checkpoints(in_folder(tmp_path)) as checkpoints:
        shutil.rmtree(tmp_path / "checkpoints")
        checkpoints.save(state, meta(1))
        checkpoints.save(state, meta(2))
        with pytest.raises(SaveFailed, match=WAY_OUT) as end:
            checkpoints.save(state, meta(3))
        assert end.value.exit_code == 70 and checkpoints.failures == 3
        (tmp_path / "checkpoints").mkdir()


@needs_mount
def test_a_disk_that_was_unmounted_is_not_mistaken_for_the_folder_below(
    state, tmp_path, small_disk
):
    """Row 12."""
    with Checkpoints(in_folder(tmp_path / "run")) as checkpoints:
        subprocess.run(["umount", str(small_disk)], check=True, timeout=30)
        try:
            with pytest.raises(SaveFailed, match=r"on another disk than it was: is it unmounted\?"):
                checkpoints.save(state, meta(1), wait=True)
            assert list(small_disk.iterdir()) == []
        finally:
            words = ["mount", "-t", "tmpfs", "tmpfs", str(small_disk)]
            subprocess.run(words, check=True, timeout=30)


@pytest.mark.slow
@needs_mount
def test_a_disk_that_does_not_answer_is_told_and_bounded(state, tmp_path, freezable_disk, capsys):
    """Row 12: it is frozen while a checkpoint is written."""
    with Checkpoints(in_folder(tmp_path / "run"), stall_s=2.0) as checkpoints:
        checkpoints.save(state, meta(1), wait=True)
        checkpoints.save(state, meta(2))
        subprocess.run(["fsfreeze", "-f", str(freezable_disk)], check=True, timeout=30)
        try:
            begun = time.monotonic()
            checkpoints.save(state, meta(3))
            checkpoints.save(state, meta(4))
            assert time.monotonic() - begun < 30
            with pytest.raises(SaveFailed, match="is still being written after"):
                checkpoints.save(state, meta(5))
        finally:
            subprocess.run(["fsfreeze", "-u", str(freezable_disk)], check=True, timeout=30)
        out = capsys.readouterr().out
        assert "step 2 failed (1 of 3 in a row)" in out and "is still being written after" in out
        begun = time.monotonic()
        while checkpoints._saving is not None and checkpoints._saving.alive:
            assert time.monotonic() - begun < 60
            time.sleep(0.05)
        checkpoints.save(state, meta(6), wait=True)
        assert checkpoints.latest == 6


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Path.touch, "is not a folder"),
        (lambda path: path.symlink_to("/nowhere/at/all"), "is a symbolic link; .*remove it"),
        (os.mkfifo, "is not a folder"),
    ],
)
def test_a_folder_that_is_none_is_refused_at_once(tmp_path, make, words):
    make(tmp_path / "checkpoints")
    with pytest.raises(UserError, match=f"/checkpoints {words}"):
        Checkpoints(in_folder(tmp_path))


@needs_mount
def test_a_disk_that_is_read_only_is_refused_at_once(tmp_path, small_disk):
    """Row 12."""
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, timeout=30)
    with pytest.raises(UserError, match=r"cannot write in .*Read-only file system"):
        Checkpoints(in_folder(tmp_path / "run"))


def test_what_a_kill_left_of_a_probe_is_removed(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in (".probe-0", ".probe-3", ".probe-1.renamed"):
        (tmp_path / "checkpoints" / name).touch()
    with Checkpoints(in_folder(tmp_path)):
        assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_question_that_is_not_answered_is_not_waited_for_twice():
    go = threading.Event()
    answers = iter(["first", "second"])

    def ask():
        assert go.wait(60)
        return next(answers)

    question = saving.TimedProbe(ask, "no answer")
    assert question(0.05) == "no answer" and question(1e6) == "no answer"
    go.set()
    question._thread.join(timeout=60)
    assert question() == "second"


def test_what_time_does_not_mend_is_not_tried_again(tmp_path, monkeypatch):
    """Row 12: a file in the folder's place, under a supervisor."""
    monkeypatch.setenv("ULTRASCALE_ATTEMPT", "1")
    (tmp_path / "checkpoints").touch()
    with pytest.raises(UserError, match="is not a folder") as refused:
        Checkpoints(in_folder(tmp_path))
    assert refused.value.exit_code == 2


@needs_mount
@pytest.mark.parametrize(("supervised", "code"), [(True, 70), (False, 2)])
def test_a_disk_that_is_full_at_a_restart_is_tried_again(
    tmp_path, monkeypatch, small_disk, supervised, code
):
    """Row 11: a supervisor gives up for ever after exit code 2."""
    if supervised:
        monkeypatch.setenv("ULTRASCALE_ATTEMPT", "1")
    with pytest.raises(OSError, match="No space"), open(small_disk / "b", "wb", 0) as file:
        while file.write(bytes(1 << 16)):
            pass
    with pytest.raises(UserError, match="No space left") as refused:
        Checkpoints(in_folder(tmp_path / "run"))
    assert refused.value.exit_code == code


def test_what_a_save_cost_is_on_record(state, tmp_path):
    with Checkpoints(in_folder(tmp_path), Events(tmp_path, 0)) as checkpoints:
        checkpoints.save(state, meta(3), wait=True)
    [event] = [row for row in read_events(tmp_path) if row["kind"] == "saved"]
    size = sum(files(tmp_path / "checkpoints/3").values())
    assert (event["step"], event["bytes"]) == (3, size)
    assert event["write_s"] > 0
