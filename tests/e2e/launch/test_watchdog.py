"""Processes that hang: each ends by itself and leaves its stacks, whatever does not answer."""

import os
import signal
import subprocess

import pytest

from tests.processes import python, wait_for
from ultrascale_jax.launch.events import ATTEMPT
from ultrascale_jax.launch.exit_codes import HUNG
from ultrascale_jax.launch.watchdog import DUMP_SIGNAL, read_beat

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
        error = run.communicate(timeout=60)[1]
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
run_dir, slow, sleep_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
FIRST_S[slow] = 0.5
limit("start")
if slow == "start":
    time.sleep(sleep_s)
FIRST_S["start"] = 60.0
with Watch(Events(run_dir, 0)):
    time.sleep(1.0)
if slow == "end":
    time.sleep(sleep_s)
"""


@pytest.mark.parametrize(
    ("slow", "sleep_s", "supervised", "code"),
    [
        ("start", 600, True, HUNG),
        ("start", 0, True, 0),
        ("end", 600, True, HUNG),
        ("end", 1, False, 0),
    ],
)
def test_a_process_that_hangs_before_or_after_its_watch_is_ended_for_its_supervisor(
    tmp_path, slow, sleep_s, supervised, code
):
    variables = {ATTEMPT: "1"} if supervised else {}
    with python("-c", OUTSIDE, tmp_path, slow, sleep_s, env=variables) as run:
        error = run.communicate(timeout=60)[1]
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
    watch.begin(7)
    watch.beat(8)
    print(watch._writer.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("silent", ["heartbeat", "stacks", "events", "console"])
def test_a_disk_that_does_not_answer_holds_up_neither_the_loop_nor_the_end(tmp_path, silent):
    rank, error = 3, subprocess.DEVNULL
    if silent == "events":
        # Nobody reads it, so its writer waits for ever.
        rank = 0
        os.mkfifo(tmp_path / "events.jsonl")
    if silent == "console":
        _reader, error = os.pipe()
        os.set_blocking(error, False)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(error, bytes(4096))
        os.set_blocking(error, True)
    with watched(tmp_path, NO_ANSWER.format(silent=silent), rank=rank, stderr=error) as run:
        output = run.communicate(timeout=60)[0]
    if silent == "stacks":
        os.kill(int(output), signal.SIGKILL)
    assert run.returncode == HUNG


def test_a_process_that_is_asked_writes_its_stacks_and_goes_on(tmp_path):
    body = """
    watch.begin(0)
    for step in range(10_000):
        watch.beat(step)
        time.sleep(0.02)
"""
    with watched(tmp_path, body, hang_s=60.0) as run:
        wait_for(lambda: read_beat(tmp_path, 3), run)
        run.send_signal(DUMP_SIGNAL)
        stacks = tmp_path / "stacks"
        (path,) = wait_for(lambda: [p for p in stacks.iterdir() if p.stat().st_size], run)
        step = read_beat(tmp_path, 3).step
        wait_for(lambda: read_beat(tmp_path, 3).step > step, run)
        wait_for(lambda: 'File "<string>"' in path.read_text(), run)
