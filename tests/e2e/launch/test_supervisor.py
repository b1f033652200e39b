"""The supervisor over small programs that say they train: real processes and signals, no JAX."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from tests.processes import is_alive, python, wait_for
from tests.supervised import supervise
from ultrascale_jax.launch import supervisor
from ultrascale_jax.launch.events import read_events
from ultrascale_jax.launch.goodput import read_beat, read_ledger
from ultrascale_jax.launch.sigterm import SignalListener
from ultrascale_jax.launch.supervisor import Supervisor


def told(run_dir, kind):
    return [event for event in read_events(run_dir) if event["kind"] == kind]


def spawns(run_dir):
    return len(told(run_dir, "spawn"))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """These programs need no seconds to end."""
    monkeypatch.setattr(supervisor, "BACK_OFF_S", 0.01)
    monkeypatch.setattr(supervisor, "GRACE_S", 0.5)


def test_all_processes_are_started_again_until_they_are_done(tmp_path, capfd):
    body = """
    train(0, 5)
    print("here is", rank, flush=True)
    if attempt == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(600 if attempt == 0 else 0)
    """
    assert supervise(tmp_path, body).run() == 0
    assert [event["attempt"] for event in told(tmp_path, "spawn")] == [0, 1]
    assert [(event["of"], event["code"]) for event in told(tmp_path, "died")] == [(1, -11)]
    # The other one was in no collective, but would have been.
    assert told(tmp_path, "exit")[0]["codes"] == {"0": -9, "1": -11}
    output = capfd.readouterr().out
    assert "\nhere is 0\n" in f"\n{output}" and "\n[1] here is 1\n" in f"\n{output}"
    assert "rank 1 was killed by SIGSEGV; restart 1" in output
    assert supervise(tmp_path, "pass").run() == 0
    assert told(tmp_path, "spawn")[-1]["attempt"] == 2


def test_restarts_that_bring_no_new_step_end_after_the_third_and_wait_longer(
    tmp_path, capfd, monkeypatch
):
    """Row 28."""
    monkeypatch.setattr(supervisor, "BACK_OFF_S", 0.1)
    body = "train(0, 2); os._exit(70)"
    assert supervise(tmp_path, body, ranks=(0,), give_up_s=0.0).run() == 70
    spawned = [event["time"] for event in told(tmp_path, "spawn")]
    gone = [event["time"] for event in told(tmp_path, "exit")]
    pauses = [after - before for before, after in zip(gone, spawned[1:], strict=False)]
    for pause, least in zip(pauses, (0.1, 0.2, 0.4), strict=True):
        assert pause >= least
    output = capfd.readouterr().out.splitlines()
    assert any("no restart: no new step in 3 restarts and " in line for line in output)
    assert output[-1] == "rank 0 ended with exit code 70"
    (end,) = told(tmp_path, "gave_up")
    assert end["code"] == 70


@pytest.mark.parametrize(
    ("body", "options", "code", "starts"),
    [
        # An outage: five restarts fail at once, as where storage is gone; then it is back.
        ("train(0, 2 + 2 * (attempt > 5)); os._exit(70 * (attempt < 6))", {"give_up_s": 600}, 0, 7),
        # Each restart brings a new step.
        ("train(0, attempt); os._exit(70 * (attempt < 6))", {"give_up_s": 0}, 0, 7),
        # There are no more restarts than allowed, whatever the time.
        ("train(0, 1); os._exit(70)", {"max_restarts": 0, "give_up_s": 600}, 70, 1),
        ("train(0, attempt + 1); os._exit(70)", {"max_restarts": 1}, 70, 2),
    ],
)
def test_restarts_go_on_while_they_help_or_are_allowed(tmp_path, body, options, code, starts):
    assert supervise(tmp_path, body, ranks=(0,), **options).run() == code
    assert spawns(tmp_path) == starts


@pytest.mark.parametrize("code", [2, 3])
def test_a_code_that_says_so_ends_the_run(tmp_path, code):
    body = f"""
    if rank == 1:
        sys.exit({code})
    time.sleep(600)
    """
    assert supervise(tmp_path, body).run() == code
    assert spawns(tmp_path) == 1


def test_one_that_ends_itself_at_its_limit_is_recorded_and_told_as_the_cause(tmp_path, capfd):
    body = """
    train(0, 3)
    if attempt == 0:
        time.sleep(600)
    train(3, 60)
    """
    assert supervise(tmp_path, body, ranks=(0,), hang_s=3.0).run() == 0
    (hang,) = told(tmp_path, "hang")
    assert (hang["of"], hang["section"], hang["step"]) == (0, "step", 3)
    assert "Timeout" in Path(hang["stacks"]).read_text()
    spent = {name for name, seconds in read_ledger(tmp_path).seconds.items() if seconds > 0}
    assert spent >= {"hang", "productive", "down"}
    assert "rank 0 made no progress in section step after step 3 (" in capfd.readouterr().out


def test_the_first_failure_is_told_last(tmp_path, capfd):
    body = """
    events = Events(run_dir, rank)
    if rank == 0:
        events.record("failure", summary="peer is gone", first=False)
        time.sleep(600)
    while not (run_dir / "events.jsonl").exists():
        time.sleep(0.01)
    events.record("failure", summary="ValueError: the cause", first=True)
    os._exit(70)
    """
    assert supervise(tmp_path, body, max_restarts=0).run() == 70
    assert capfd.readouterr().out.splitlines()[-1] == "rank 1: ValueError: the cause"


def apart(tmp_path, body, ranks=2, **options):
    """Run the supervisor of so many processes in one of its own."""
    return python("-m", "tests.supervised", tmp_path, ranks, body, **options)


NO_ANSWER = """
import os
if attempt == 0:
    train(0, 3)
    # Nobody writes to the FIFO in place of the heartbeat, so its reader waits for ever.
    beat = run_dir / "heartbeats" / str(rank)
    beat.unlink()
    os.mkfifo(beat)
    (run_dir / "silent").touch()
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(5))
while True:
    time.sleep(0.1)
"""


def test_a_disk_that_does_not_answer_keeps_no_signal_from_the_processes(tmp_path):
    with apart(tmp_path, NO_ANSWER, ranks=1) as run:
        wait_for((tmp_path / "silent").exists, run)
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=300) == 5


PATIENT = """
def told(number, frame):
    print("told", flush=True)
    with open(run_dir / "signals", "a") as file:
        file.write(f"{rank}\\n")
signal.signal(signal.SIGTERM, told)
watch.beat(1)
while not (run_dir / "signals").exists() or len((run_dir / "signals").read_text().split()) < 2:
    time.sleep(0.02)
time.sleep(0.5)
"""


def beats(run_dir):
    both = [read_beat(run_dir, rank) for rank in (0, 1)]
    return both if all(beat is not None and beat.step > 0 for beat in both) else None


def test_processes_that_the_signal_kills_before_they_listen_had_nothing_to_save(tmp_path, capfd):
    def stop():
        wait_for(lambda: told(tmp_path, "spawn"))
        os.kill(os.getpid(), signal.SIGTERM)

    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    stopping = threading.Thread(target=stop)
    with SignalListener() as listener:
        run = Supervisor(
            lambda restarts: sleep, lambda: [{}, {}], (0, 1), tmp_path, signals=listener.signals
        )
        stopping.start()
        assert run.run() == 0
    stopping.join()
    assert capfd.readouterr().out.splitlines()[-1] == "stopped by SIGTERM before the first step"
    (end,) = told(tmp_path, "gave_up")
    assert end["reason"] == "told to stop"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_supervisor_reaches_each_process_once(tmp_path, number):
    with apart(tmp_path, PATIENT) as run:
        wait_for(lambda: beats(tmp_path), run)
        # Again and again, as schedulers do; Ctrl-C twice would kill.
        os.killpg(run.pid, number)
        if number == signal.SIGTERM:
            wait_for(lambda: told(tmp_path, "told"), run)
            run.send_signal(number)
        assert run.wait(timeout=300) == 0
    assert sorted((tmp_path / "signals").read_text().split()) == ["0", "1"]
    assert spawns(tmp_path) == 1


def test_no_process_outlives_its_supervisor(tmp_path):
    with apart(tmp_path, PATIENT) as run:
        pids = [beat.pid for beat in wait_for(lambda: beats(tmp_path), run)]
        run.kill()
        run.wait(timeout=300)
        wait_for(lambda: not any(is_alive(pid) for pid in pids))
