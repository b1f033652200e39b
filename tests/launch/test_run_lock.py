"""The lock of a run directory: one living holder, and none that the dead can keep."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from ultrascale_jax.config import UserError
from ultrascale_jax.launch import run_lock as lock_module
from ultrascale_jax.launch.run_lock import RunLock

HOLD = """
import sys, time
from pathlib import Path
from ultrascale_jax.launch.run_lock import RunLock
with RunLock(Path(sys.argv[1]), beat_s=0.1):
    print("held", flush=True)
    sys.stdin.readline()
"""


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


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


def test_it_is_there_while_held_and_gone_afterwards(tmp_path):
    with RunLock(tmp_path / "new/run") as lock:
        assert lock.held and lock.note is None
        holder = json.loads((tmp_path / "new/run/lock").read_text())
        assert holder["pid"] == os.getpid() and holder["host"] and holder["started"]
    assert not lock.held
    assert list((tmp_path / "new/run").iterdir()) == []


def test_a_second_job_is_refused_and_told_who_holds_it(tmp_path, holder):
    with pytest.raises(UserError, match=rf"in use by pid {holder.pid} on .*log\.run_dir"):
        RunLock(tmp_path).__enter__()
    holder.communicate("end\n", timeout=30)
    with RunLock(tmp_path) as lock:
        assert lock.note is None


def test_a_killed_holder_is_succeeded_at_once_reaped_or_not(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    with RunLock(tmp_path, stale_s=1e9) as lock:
        assert lock.held
        assert f"took over the lock of pid {holder.pid} " in lock.note
        assert "its process is gone" in lock.note


def test_another_process_of_the_same_number_is_not_the_holder(tmp_path):
    with RunLock(tmp_path) as first:
        change(first.path, birth=1)
        with RunLock(tmp_path, stale_s=1e9) as lock:
            assert lock.held


def test_a_holder_on_another_machine_is_alive_while_it_beats(tmp_path):
    with RunLock(tmp_path, beat_s=0.05) as lock:
        change(lock.path, machine="another", host="far", pid=7)
        stop = threading.Event()

        def beat():
            while not stop.wait(0.05):
                os.utime(lock.path)

        beating = threading.Thread(target=beat)
        beating.start()
        try:
            with pytest.raises(UserError, match="in use by pid 7 on far"):
                RunLock(tmp_path, stale_s=1e9).__enter__()
        finally:
            stop.set()
            beating.join()


def test_one_that_does_not_beat_is_succeeded_and_finds_out(tmp_path, capsys):
    with RunLock(tmp_path) as first:
        change(first.path, machine="another", host="far", pid=7)
        with RunLock(tmp_path, stale_s=0.2) as second:
            assert second.held and not first.held
            assert "pid 7 on far" in second.note and "no sign of life" in second.note
        assert "waiting up to 0.2 s to see if pid 7 on far" in capsys.readouterr().out


def test_a_lock_that_another_has_taken_is_not_removed(tmp_path):
    with RunLock(tmp_path) as first:
        change(first.path, token="another's")
        assert not first.held
        text = first.path.read_text()
    assert first.path.read_text() == text


NAMES = ["host", "pid", "started", "birth", "machine"]
DAMAGED = [
    *(
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"pid": 1}',
        b"[" * 100_000,
        b"\xff",
        json.dumps(NAMES).encode(),
    ),
    *(json.dumps(dict.fromkeys(NAMES, value)).encode() for value in (None, [], "\x1b[2J")),
    b'{"pid": %s}' % (b"9" * 5000),
]


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: ascii(text[:16]))
def test_a_damaged_lock_is_taken_over_when_nobody_touches_it(tmp_path, capsys, text):
    (tmp_path / "lock").write_bytes(text)
    with RunLock(tmp_path, stale_s=0.05, settle_s=0.01) as lock:
        assert lock.held and "an unknown job (the lock is damaged)" in lock.note
    assert "waiting up to 0.05 s to see if an unknown job" in capsys.readouterr().out


@pytest.mark.parametrize("text", DAMAGED[:8], ids=lambda text: ascii(text[:16]))
def test_a_holder_whose_lock_is_damaged_keeps_it_and_writes_it_anew(tmp_path, capsys, text):
    with RunLock(tmp_path, beat_s=0.02) as lock:
        sound = lock.path.read_text()
        lock.path.write_bytes(text)
        assert lock.held
        until = time.monotonic() + 30
        while lock.path.read_bytes() != sound.encode():
            assert time.monotonic() < until
            time.sleep(0.01)
        # Who watched the damaged one sees that it has a holder.
        with pytest.raises(UserError, match=f"in use by pid {os.getpid()}"):
            RunLock(tmp_path).__enter__()
    assert list(tmp_path.iterdir()) == []
    assert "lock was damaged; it is written anew" in capsys.readouterr().out


def test_what_a_lock_says_is_not_printed_raw(tmp_path, capsys):
    with RunLock(tmp_path) as first:
        change(first.path, machine="another", host="\x1b[2J\n", pid=7)
        with RunLock(tmp_path, stale_s=0.05, settle_s=0.01) as lock:
            assert r"pid 7 on \x1b[2J\n" in lock.note and "\x1b" not in lock.note
    assert "\x1b" not in capsys.readouterr().out


def test_a_link_in_its_place_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(UserError, match=r"lock is a symbolic link; .*remove it"):
        RunLock(tmp_path).__enter__()
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_that_start_together_one_gets_it(tmp_path, monkeypatch, stale):
    """Processes that find a stale lock all look twice, and see it, before the first of them writes."""
    real, looks = lock_module._read, threading.local()

    def read(path):
        found = real(path)
        looks.count = getattr(looks, "count", 0) + 1
        if stale and looks.count == 2:
            together.wait(timeout=60)
        return found

    if stale:
        with RunLock(tmp_path) as dead:
            change(dead.path, birth=1)
            text = dead.path.read_text()
        dead.path.write_text(text)
    results, together = [], threading.Barrier(8)
    locks = [RunLock(tmp_path) for _ in range(8)]
    monkeypatch.setattr(lock_module, "_read", read)

    def start(lock):
        together.wait()
        try:
            results.append(lock.__enter__())
        except UserError:
            results.append(None)

    threads = [threading.Thread(target=start, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [lock for lock in results if lock is not None]
    assert len(winners) == 1 and winners[0].held
    winners[0].__exit__()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_read_now_is_not_taken_for_lost(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    with RunLock(tmp_path) as lock:
        with monkeypatch.context() as patch:
            patch.setattr(lock_module, "_read", fail)
            assert lock.held
        change(lock.path, token="another's")
        assert not lock.held


@pytest.mark.parametrize(("supervised", "code"), [(True, 70), (False, 2)])
def test_a_predecessor_that_is_still_ending_is_waited_for_by_a_supervisor(
    tmp_path, holder, monkeypatch, supervised, code
):
    if supervised:
        monkeypatch.setenv("US_ATTEMPT", "1")
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
