"""Runs under the supervisor: whatever strikes them, they reach the losses of a run that nothing struck."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.conftest import LIMIT_S, RECIPE, ROOT, environment
from ultrascale_jax.launch.events import read_events
from ultrascale_jax.launch.goodput import read_ledger
from ultrascale_jax.launch.procfs import read_stat
from ultrascale_jax.launch.watchdog import read_beat


@pytest.fixture
def launch(job, tmp_path):
    """`launch(*words, fault=...)` starts RECIPE on 2 x 2 devices under the supervisor."""

    def start(*words, fault=""):
        before = ("launch", "--processes", "2", "--devices-per-process", "2", "--")
        options = {"module": "ultrascale_jax", "before": before, "processes": 1, "fault": fault}
        return job(tmp_path / "run", *words, **options)

    return start


def told(job, kind):
    return [event for event in read_events(job.run_dir) if event["kind"] == kind]


def wait_for(condition, process):
    """Until `condition()` is true; the test fails if the process ends before."""
    until = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    return found


def losses(rows):
    return {row["step"]: row["loss"].hex() for row in rows}


@pytest.mark.faults
def test_a_killed_worker_costs_steps_and_no_bit_of_the_losses(launch, undisturbed):
    """Row 1. The ledger knows the restart, and no more steps are done again than lie between two checkpoints."""
    run = launch(fault="kill@10@1")
    assert run.wait() == [0], run.outputs[0]
    assert run.losses() == losses(undisturbed["rows"])
    assert [event["of"] for event in told(run, "died")] == [1]
    assert "rank 1 was killed by SIGKILL; restart 1 in 1 s" in run.outputs[0]
    ledger = read_ledger(run.run_dir)
    assert (ledger.restarts, ledger.steps) == (1, 12)
    # Step 9 was under way when the worker died; the checkpoint of step 8 may not have been complete.
    assert ledger.steps_again <= 9
    spawned, gone = told(run, "spawn")[0]["time"], told(run, "exit")[-1]["time"]
    assert ledger.total_s == pytest.approx(gone - spawned, abs=0.01)
    assert {"productive", "start-up", "compile", "checkpoint", "down"} <= {
        name for name, seconds in ledger.seconds.items() if seconds > 0
    }


@pytest.mark.faults
def test_a_killed_coordinator_costs_no_bit_of_the_losses(launch, undisturbed):
    """Row 2."""
    run = launch(fault="kill@10@0")
    assert run.wait() == [0], run.outputs[0]
    assert run.losses() == losses(undisturbed["rows"])
    assert [event["of"] for event in told(run, "died")] == [0]


@pytest.mark.faults
def test_a_stopped_worker_is_killed_and_its_stacks_are_kept(launch, undisturbed):
    """Row 4. The others' own watchdogs and the supervisor find out; who was stopped is named as the cause."""
    run = launch("--watch.hang-s", "10", fault="stop@10@1")
    assert run.wait() == [0], run.outputs[0]
    assert run.losses() == losses(undisturbed["rows"])
    stuck = told(run, "stuck")
    assert [event["of"] for event in stuck] == [1]
    assert "training/loop.py" in Path(stuck[0]["stacks"]).read_text()
    assert "rank 1 is stopped by a signal in section step" in run.outputs[0]
    # The stopped one's watchdog wakes with it, to write the stacks, and may be quick enough to end it.
    hang = told(run, "hang")
    assert hang[0]["of"] == 0 and Path(hang[0]["stacks"]).stat().st_size > 0
    assert read_ledger(run.run_dir).seconds["hang"] >= 10.0


@pytest.mark.faults
def test_a_stalled_loader_is_a_wait_for_data_that_the_watchdog_ends(launch, undisturbed):
    """Row 20."""
    run = launch("--watch.hang-s", "10", fault="stall@10@1")
    assert run.wait() == [0], run.outputs[0]
    assert run.losses() == losses(undisturbed["rows"])
    hung = {event["of"]: event["section"] for event in told(run, "hang")}
    assert hung.get(1) == "data" or "data" in run.outputs[0]


@pytest.mark.faults
def test_a_straggler_is_named_within_twenty_steps(launch):
    """Row 19."""
    fault = ",".join(f"sleep@{step}@1" for step in range(4, 40, 5))
    run = launch("--train.steps", "40", fault=fault)
    assert run.wait() == [0], run.outputs[0]
    found = told(run, "straggler")
    assert {event["of"] for event in found} == {1} and found[0]["step"] <= 20
    assert "straggler: rank 1 on " in run.outputs[0]
    assert found[0]["own_p99_s"] > 1.0 > found[0]["own_p50_s"]
    (times, _) = told(run, "step_times")
    assert [row["of"] for row in times["slowest"]] == [1, 0]


@pytest.mark.faults
def test_what_a_restart_cannot_mend_is_not_restarted(launch):
    """Row 28, whose other half is in tests/launch/test_supervisor.py. Nothing is started a second time."""
    run = launch("--mesh.tp", "3")
    assert run.wait() == [2]
    assert len(told(run, "spawn")) == 1
    assert run.outputs[0].splitlines()[-1].startswith("rank ")


@pytest.mark.faults
def test_sigterm_to_the_supervisor_saves_once_and_ends_all(launch):
    run = launch("--train.steps", "100000")
    (supervisor,) = run.processes
    wait_for(lambda: len(run.rows()) > 3, supervisor)
    supervisor.send_signal(signal.SIGTERM)
    assert run.wait() == [0], run.outputs[0]
    assert "stopped by SIGTERM after step" in run.outputs[0]
    assert len(told(run, "spawn")) == 1 and len(told(run, "told")) == 1
    assert run.checkpoints()[-1] == run.rows()[-1]["step"]


@pytest.mark.faults
def test_a_killed_supervisor_leaves_no_orphans(launch):
    run = launch("--train.steps", "100000")
    (supervisor,) = run.processes
    beats = wait_for(lambda: all_beats(run), supervisor)
    supervisor.kill()
    supervisor.wait(timeout=30)
    until = time.monotonic() + 30
    while any(is_alive(beat.pid) for beat in beats):
        assert time.monotonic() < until, "a process outlived its supervisor"
        time.sleep(0.05)


@pytest.mark.faults
def test_a_soak_of_three_minutes_loses_no_bit_and_no_second(tmp_path):
    words = ["--minutes", "3", "--every", "15", "--recipe", RECIPE, "--inside-every", "40"]
    words += ["--save-every", "5"]
    places = ["--run-dir", str(tmp_path / "soak"), "--out", str(tmp_path / "soak.md")]
    soak = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.soak", *words, *places],
        env=environment(2),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output = soak.communicate(timeout=900)[0]
    finally:
        soak.terminate()
        soak.wait(timeout=60)
    assert soak.returncode == 0, output[-5000:]
    report = (tmp_path / "soak.md").read_text()
    lines = report.partition("## Verdict\n\n")[2].partition("\n\n")[0].splitlines()
    assert lines and all(line.startswith("- Yes: ") for line in lines), report


def all_beats(run):
    beats = [read_beat(run.run_dir, rank) for rank in range(2)]
    return beats if all(beat is not None and beat.step > 0 for beat in beats) else None


def is_alive(pid):
    stat = read_stat(pid)
    return stat is not None and stat.is_alive
