"""Processes that hang: each ends by itself and leaves its stacks, whatever does not answer."""

import os
import signal
import subprocess

import pytest

from tests.processes import python
from ultrascale_jax.launch.events import ATTEMPT
from ultrascale_jax.launch.exit_codes import HUNG

WATCHED = """
import contextlib, ctypes, os, signal, sys, threading, time
from pathlib import Path
from ultrascale_jax.launch.events import Events
from ultrascale_jax.launch.watchdog import Watch
with Watch(Events(Path(sys.argv[1]), int(sys.argv[2])), hang_s=float(sys.argv[3])) as watch:
"""


def watched(tmp_path, body, *, rank=3, hang_s=0.5, **options):
    return python("-c", WATCHED + body, tmp_path, rank, hang_s, **options)


HANGS = {
    # As in a collective: other threads of Python run on.
    "asleep": "time.sleep(600)",
    # As in a library that never lets go: no thread of Python runs any more.
    "lock": "ctypes.PyDLL(None).sleep(600)",
}


@pytest.mark.parametrize("hang", HANGS)
def test_a_process_without_progress_writes_all_stacks_and_ends(tmp_path, hang):
    body = f"""
    def the_other_thread():
        time.sleep(600)
    threading.Thread(target=the_other_thread, daemon=True).start()
    watch.begin(7)
    watch.beat(8)
    {HANGS[hang]}
"""
    with watched(tmp_path, body) as run:
        error = run.communicate(timeout=300)[1]
    assert run.returncode == HUNG
    path = tmp_path / "stacks/rank3.attempt0.txt"
    assert error.startswith("rank 3: the stacks of its threads") and str(path) in error
    stacks = path.read_text()
    assert "the_other_thread" in stacks and "Timeout (0:00:00" in stacks.splitlines()[0]


OUTSIDE = """
import sys, time
from pathlib import Path
from ultrascale_jax.launch.events import Events
from ultrascale_jax.launch.watchdog import FIRST_S, Watch, limit
run_dir, slow, limit_s, sleep_s = Path(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:])
FIRST_S[slow] = limit_s
limit("start")
if slow == "start":
    time.sleep(sleep_s)
FIRST_S["start"] = 60.0
with Watch(Events(run_dir, 0)):
    time.sleep(limit_s + 0.5)
if slow == "end":
    time.sleep(sleep_s)
"""


@pytest.mark.parametrize(
    ("slow", "limit_s", "sleep_s", "supervised", "code"),
    [
        ("start", 0.1, 600, True, HUNG),
        # Longer than any machine takes to begin the watch.
        ("start", 10, 0, True, 0),
        ("end", 0.1, 600, True, HUNG),
        ("end", 0.1, 1, False, 0),
    ],
)
def test_a_process_that_hangs_before_or_after_its_watch_is_ended_for_its_supervisor(
    tmp_path, slow, limit_s, sleep_s, supervised, code
):
    variables = {ATTEMPT: "1"} if supervised else {}
    with python("-c", OUTSIDE, tmp_path, slow, limit_s, sleep_s, env=variables) as run:
        error = run.communicate(timeout=300)[1]
    assert run.returncode == code and ("Timeout (0:00:00" in error) is (code == HUNG)


NO_ANSWER = """
    silent = {silent!r}
    if silent == "heartbeat":
        watch._write = threading.Event().wait
    if silent == "stacks":
        # The writer waits for its disk, and its pipe is full.
        watch._writer.send_signal(signal.SIGSTOP)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(watch._stacks, bytes(4096))
    print(watch._writer.pid, flush=True)
    watch.begin(7)
    watch.beat(8)
    if silent == "events":
        # Nobody reads it, so its writer waits for ever.
        watch._events.path.unlink(missing_ok=True)
        os.mkfifo(watch._events.path)
        watch._events.record("saved")
    time.sleep(600)
"""


@pytest.mark.parametrize("silent", ["heartbeat", "stacks", "events", "console"])
def test_a_disk_that_does_not_answer_holds_up_neither_the_loop_nor_the_end(tmp_path, silent):
    error = subprocess.DEVNULL
    if silent == "console":
        _reader, error = os.pipe()
        os.set_blocking(error, False)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(error, bytes(4096))
        os.set_blocking(error, True)
    with watched(tmp_path, NO_ANSWER.format(silent=silent), stderr=error) as run:
        output = run.communicate(timeout=300)[0]
    if silent == "stacks":
        os.kill(int(output), signal.SIGKILL)
    assert run.returncode == HUNG
