import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.test_events import HOSTILE
from ultrascale_jax.launch.events import ATTEMPT, Events, read_events
from ultrascale_jax.launch.exit_codes import HUNG
from ultrascale_jax.launch.watchdog import (
    DATA_FLOOR_S,
    DUMP_SIGNAL,
    FIRST_S,
    FLOOR_S,
    SAVE_FLOOR_S,
    Watch,
    last_sign,
    read_beat,
)

ROOT = Path(__file__).parents[2]


def sections(run_dir):
    return [
        (event["name"], event["step"])
        for event in read_events(run_dir)
        if event["kind"] == "section"
    ]


def wait_for(condition):
    until = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


def test_a_heartbeat_says_where_the_process_is_and_until_when_that_is_right(tmp_path):
    with Watch(Events(tmp_path, 0)) as watch:
        assert read_beat(tmp_path, 0).section == "start"
        assert read_beat(tmp_path, 0).bound_s == FIRST_S["start"]
        watch.begin(4)
        watch.beat(5)
        beat = wait_for(lambda: (b := read_beat(tmp_path, 0)).step == 5 and b)
        assert (beat.section, beat.furthest, beat.pid) == ("step", 5, os.getpid())
        assert beat.bound_s == FLOOR_S
        with watch.data(lambda: False):
            beat = wait_for(lambda: (b := read_beat(tmp_path, 0)).section == "data" and b)
            assert beat.bound_s == DATA_FLOOR_S
    assert read_beat(tmp_path, 0).section == "end"
    assert read_beat(tmp_path, 0).data_wait_s > 0


def test_the_bound_is_learned_and_one_that_is_given_is_for_repeated_sections(tmp_path):
    watch = Watch(Events(tmp_path, 0))
    watch.begin(0)
    for step, seconds in enumerate((2.0, 30.0, 7.0), start=1):  # the longest counts, not the last
        watch._mark -= seconds
        watch.beat(step)
    for name, seconds in (("save", 30.0), ("compare", 40.0), ("compare", 7.0)):
        with watch.section(name):
            watch._mark -= seconds
    bounds = [watch._bound_s(name) for name in ("step", "save", "compare")]
    assert bounds == pytest.approx([300.0, SAVE_FLOOR_S, 400.0], abs=5)
    assert watch._bound_s("evaluate") == FIRST_S["evaluate"]
    given = Watch(Events(tmp_path, 0), hang_s=5.0)
    assert given._bound_s("step") == given._bound_s("save") == 5.0
    assert given._bound_s("compile") == FIRST_S["compile"]


def test_waits_for_data_behind_busy_devices_are_not_lost(tmp_path):
    with Watch(Events(tmp_path, 0)) as watch, watch.data(lambda: True):
        pass
    assert read_beat(tmp_path, 0).data_wait_s == 0.0


def test_steps_that_an_earlier_try_has_done_are_done_again(tmp_path):
    with Watch(Events(tmp_path, 0)) as watch:
        watch.begin(0)
        for step in (1, 2, 3, 4):
            watch.beat(step)
    assert last_sign(tmp_path)["furthest"] == 4
    with Watch(Events(tmp_path, 0)) as watch:
        with watch.section("restore"):
            pass
        watch.begin(2)
        for step in (3, 4, 5):
            watch.beat(step)
    assert sections(tmp_path) == [
        *[("warm-up", 0), ("step", 0), ("restore", 0), ("start", 0)],
        *[("warm-up", 2), ("again", 2), ("step", 4)],
    ]
    with Watch(Events(tmp_path, 0), fresh=True) as watch:
        watch.begin(0)
    assert sections(tmp_path)[-1] == ("warm-up", 0)


def test_only_rank_0_writes_events_and_no_empty_file_of_stacks_stays(tmp_path):
    with Watch(Events(tmp_path, 1)) as watch:
        watch.begin(0)
    assert read_events(tmp_path) == [] and read_beat(tmp_path, 1) is not None
    assert list((tmp_path / "stacks").iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": 1}', '{"pid": "x", "step": []}'])
def test_a_heartbeat_that_cannot_be_read_is_none(tmp_path, text):
    (tmp_path / "heartbeats").mkdir()
    (tmp_path / "heartbeats/0").write_text(text)
    assert read_beat(tmp_path, 0) is None and last_sign(tmp_path) == {}


@pytest.mark.parametrize("name", ["step", "bound_s", "time", "section"])
def test_a_heartbeat_with_numbers_that_cannot_be_is_none(tmp_path, name):
    with Watch(Events(tmp_path, 0)) as watch:
        watch.begin(4)
    path = tmp_path / "heartbeats/0"
    sound = json.loads(path.read_bytes())
    for hostile in HOSTILE:
        path.write_text(json.dumps(sound | {name: "?"}).replace('"?"', hostile))
        assert read_beat(tmp_path, 0) is None and last_sign(tmp_path) == {}


def start(tmp_path, body, *, rank=3, hang_s=0.5, stderr=subprocess.PIPE):
    program = (
        "import time; from pathlib import Path\n"
        "from ultrascale_jax.launch.events import Events\n"
        "from ultrascale_jax.launch.watchdog import Watch\n"
        f"with Watch(Events(Path({str(tmp_path)!r}), {rank}), hang_s={hang_s}) as watch:\n{body}"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


HANGS = {
    # As in a collective: other threads of Python run on.
    "asleep": "time.sleep(600)",
    # As in a library that never lets go: no thread of Python runs any more.
    "lock": "ctypes.PyDLL(None).sleep(600)",
}


@pytest.mark.parametrize("hang", HANGS)
def test_a_process_without_progress_writes_all_stacks_and_ends(tmp_path, hang):
    program = f"""
    import ctypes, threading
    def the_other_thread():
        time.sleep(600)
    threading.Thread(target=the_other_thread, daemon=True).start()
    watch.begin(7)
    {HANGS[hang]}
"""
    run = start(tmp_path, program)
    try:
        error = run.communicate(timeout=60)[1]
    finally:
        run.kill()
    assert run.returncode == HUNG
    path = tmp_path / "stacks/rank3.attempt0.txt"
    assert (
        error
        == f"rank 3: the stacks of its threads, which tell what it waited for, are in {path}\n"
    )
    stacks = path.read_text()
    assert "the_other_thread" in stacks and "Timeout (0:00:00" in stacks.splitlines()[0]


OUTSIDE = """
import time
from pathlib import Path
from ultrascale_jax.launch.events import Events
from ultrascale_jax.launch.watchdog import FIRST_S, Watch, limit
FIRST_S["{slow}"] = 0.5
limit("start")
if "{slow}" == "start" and not {trains}:
    time.sleep(600)
FIRST_S["start"] = 60.0
with Watch(Events(Path({run_dir!r}), 0)):
    time.sleep(1.0)
if "{slow}" == "end":
    time.sleep(600 if {supervised} else 1.0)
"""


@pytest.mark.parametrize(
    ("slow", "trains", "supervised", "code"),
    [
        ("start", False, True, HUNG),
        ("start", True, True, 0),
        ("end", True, True, HUNG),
        ("end", True, False, 0),
    ],
)
def test_a_process_that_hangs_before_or_after_its_watch_is_ended_for_its_supervisor(
    tmp_path, slow, trains, supervised, code
):
    names = {"slow": slow, "trains": trains, "supervised": supervised}
    program = OUTSIDE.format(run_dir=str(tmp_path), **names)
    environ = os.environ | ({ATTEMPT: "1"} if supervised else {})
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, timeout=60)
    assert run.returncode == code and (b"Timeout (0:00:00" in run.stderr) is (code == HUNG)


NO_ANSWER = """
    import contextlib, os, signal, threading
    if {silent!r} == "heartbeat":
        watch._write = threading.Event().wait
    if {silent!r} == "stacks":
        # The writer waits for its disk, and what leads to it is full.
        watch._writer.send_signal(signal.SIGSTOP)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(watch._stacks, bytes(4096))
    watch.begin(7)
    print(watch._writer.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("silent", ["heartbeat", "stacks", "events", "console"])
def test_a_disk_that_does_not_answer_holds_up_neither_the_loop_nor_the_end(tmp_path, silent):
    rank, error = 3, subprocess.DEVNULL
    if silent == "events":
        # Nobody reads it, so who opens it to write waits for ever.
        rank = 0
        os.mkfifo(tmp_path / "events.jsonl")
    if silent == "console":
        _reader, error = os.pipe()
        os.set_blocking(error, False)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(error, bytes(4096))
        os.set_blocking(error, True)
    run = start(tmp_path, NO_ANSWER.format(silent=silent), rank=rank, stderr=error)
    try:
        output = run.communicate(timeout=60)[0]
    finally:
        run.kill()
        if silent == "stacks":
            os.kill(int(output), signal.SIGKILL)
    assert run.returncode == HUNG


def test_a_process_that_is_asked_writes_its_stacks_and_goes_on(tmp_path):
    program = """
    watch.begin(0)
    for step in range(1000):
        watch.beat(step)
        time.sleep(0.02)
"""
    run = start(tmp_path, program, hang_s=60.0)
    try:
        wait_for(lambda: read_beat(tmp_path, 3))
        run.send_signal(DUMP_SIGNAL)
        (path,) = wait_for(lambda: [p for p in (tmp_path / "stacks").iterdir() if p.stat().st_size])
        step = read_beat(tmp_path, 3).step
        wait_for(lambda: read_beat(tmp_path, 3).step > step)
        wait_for(lambda: 'File "<string>"' in path.read_text())
    finally:
        run.send_signal(signal.SIGKILL)
        run.communicate(timeout=60)
