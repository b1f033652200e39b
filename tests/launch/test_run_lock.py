"""The lock of a run directory: one living holder, and none that the dead can keep."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading

import pytest

from ultrascale_jax.config import UserError
from ultrascale_jax.launch.run_lock import RunLock

HOLD = """
import sys
from pathlib import Path
from ultrascale_jax.launch.run_lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path):
    run = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert run.stdout is not None and run.stdout.readline() == "held\n"
        yield run
    finally:
        run.kill()
        run.communicate(timeout=30)


def test_it_names_its_holder_while_held_and_nobody_afterwards(tmp_path):
    with RunLock(tmp_path / "new/run") as lock:
        assert lock.note is None
        holder = json.loads((tmp_path / "new/run/lock").read_text())
        assert holder["pid"] == os.getpid() and holder["host"] and holder["started"]
    assert (tmp_path / "new/run/lock").read_bytes() == b""


def test_a_second_job_is_refused_and_told_who_holds_it(tmp_path, holder):
    with pytest.raises(UserError, match=rf"in use by pid {holder.pid} on .*log\.run_dir"):
        RunLock(tmp_path).__enter__()
    holder.communicate("end\n", timeout=30)
    with RunLock(tmp_path) as lock:
        assert lock.note is None


def test_a_killed_holder_is_succeeded_at_once(tmp_path, holder):
    holder.kill()
    holder.wait(timeout=30)
    assert json.loads((tmp_path / "lock").read_text())["pid"] == holder.pid
    with RunLock(tmp_path) as lock:
        assert json.loads(lock.path.read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"[" * 100_000, b"\xff", b'{"host": 1, "pid": 2, "started": 3}'],
    ids=lambda text: ascii(text[:16]),
)
def test_what_a_lock_says_neither_frees_nor_holds_it(tmp_path, text):
    (tmp_path / "lock").write_bytes(text)
    with RunLock(tmp_path) as lock:
        lock.path.write_bytes(text)
        words = r"in use by an unknown job \(the lock is damaged\)"
        with pytest.raises(UserError, match=words):
            RunLock(tmp_path).__enter__()


def test_what_a_lock_says_is_not_printed_raw(tmp_path):
    with RunLock(tmp_path) as lock:
        lock.path.write_text(json.dumps({"host": "\x1b[2J\n", "pid": 7, "started": "now"}))
        with pytest.raises(UserError, match=r"pid 7 on \\x1b\[2J\\n"):
            RunLock(tmp_path).__enter__()


def test_a_link_in_its_place_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(UserError, match=r"lock is a symbolic link; .*remove it"):
        RunLock(tmp_path).__enter__()
    assert (tmp_path / "victim").read_text() == "precious"


def test_one_of_many_that_start_together_gets_it_again_and_again(tmp_path):
    held, most, turns = 0, 0, 0
    counting = threading.Lock()

    def take():
        nonlocal held, most, turns
        for _ in range(200):
            try:
                with RunLock(tmp_path):
                    with counting:
                        held, turns = held + 1, turns + 1
                        most = max(most, held)
                    with counting:
                        held -= 1
            except UserError:
                continue

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and turns > 0


def test_a_disk_without_locks_is_told_and_used(tmp_path, monkeypatch):
    def fail(file, how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", fail)
    with RunLock(tmp_path) as lock:
        assert lock.note == (
            f"{tmp_path}/lock: this disk has no locks (Function not implemented); start no second job in this folder"
        )


@pytest.mark.parametrize(("supervised", "code"), [(True, 70), (False, 2)])
def test_a_predecessor_that_is_still_ending_is_waited_for_by_a_supervisor(
    tmp_path, holder, monkeypatch, supervised, code
):
    if supervised:
        monkeypatch.setenv("ULTRASCALE_ATTEMPT", "1")
    with pytest.raises(UserError, match="in use by pid") as refused:
        RunLock(tmp_path).__enter__()
    assert refused.value.exit_code == code
    with pytest.raises(UserError, match="cannot write") as refused:
        RunLock(tmp_path / "lock/run").__enter__()
    assert refused.value.exit_code == 2


def test_a_run_directory_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/run/lock .*log\.run_dir"):
        RunLock(tmp_path / "file/run").__enter__()
