"""Runs under the supervisor: whatever strikes them, they reach the losses of a run that nothing struck."""

from pathlib import Path

from tests.faults.jobs import RECIPE
from tests.processes import python
from ultrascale_jax.launch.goodput import read_ledger


def test_a_killed_worker_costs_steps_and_no_bit_of_the_losses(launch, undisturbed):
    """Row 1. The ledger knows the restart, and no more steps are done again than lie between two checkpoints."""
    run = launch(fault="kill@10@1")
    output = run.check_ends(0)
    assert run.losses() == undisturbed
    assert [event["of"] for event in run.events("died")] == [1]
    assert "rank 1 was killed by SIGKILL; restart 1 in 1 s" in output
    ledger = read_ledger(run.run_dir)
    assert (ledger.restarts, ledger.steps) == (1, 12)
    # Step 9 was under way when the worker died; the checkpoint of step 8 may not have been complete.
    assert ledger.steps_again <= 9
    spawned, gone = run.events("spawn")[0]["time"], run.events("exit")[-1]["time"]
    # All but the seconds after the last heartbeat, in which the processes end.
    assert 0.0 <= gone - spawned - ledger.total_s < 60.0
    spent = {name for name, seconds in ledger.seconds.items() if seconds > 0}
    assert spent >= {"productive", "start-up", "compile", "checkpoint", "down"}


def test_a_killed_coordinator_costs_no_bit_of_the_losses(launch, undisturbed):
    """Row 2."""
    run = launch(fault="kill@10@0")
    run.check_ends(0)
    assert run.losses() == undisturbed
    assert [event["of"] for event in run.events("died")] == [0]


def test_a_stopped_worker_is_killed_with_the_one_that_waits_for_it(launch, undisturbed):
    """Row 4."""
    run = launch("--watch.hang-s", "10", fault="stop@10@1")
    run.check_ends(0)
    assert run.losses() == undisturbed
    hang = run.events("hang")[0]
    assert hang["of"] == 0 and Path(hang["stacks"]).stat().st_size > 0
    assert read_ledger(run.run_dir).seconds["hang"] > 0


def test_a_stalled_loader_is_a_wait_for_data_that_the_watchdog_ends(launch, undisturbed):
    """Row 20."""
    run = launch("--watch.hang-s", "10", fault="stall@10@1")
    output = run.check_ends(0)
    assert run.losses() == undisturbed
    hung = {event["of"]: event["section"] for event in run.events("hang")}
    assert hung.get(1) == "data" or "data" in output


def test_a_straggler_is_named_within_twenty_steps(launch):
    """Row 19."""
    fault = ",".join(f"sleep@{step}@1" for step in range(4, 40, 5))
    run = launch("--train.steps", "40", fault=fault)
    output = run.check_ends(0)
    named = run.events("straggler")
    assert {event["of"] for event in named} == {1} and named[0]["step"] <= 20
    assert "straggler: rank 1 on " in output
    assert named[0]["own_p99_s"] > 1.0 > named[0]["own_p50_s"]
    (times, _) = run.events("step_times")
    assert [row["of"] for row in times["slowest"]] == [1, 0]


def test_a_soak_of_three_minutes_keeps_every_promise(tmp_path):
    words = ["--minutes", "3", "--every", "15", "--recipe", RECIPE, "--inside-every", "40"]
    words += ["--save-every", "5", "--run-dir", tmp_path / "soak"]
    with python("-m", "tests.faults.soak", *words, devices=2) as soak:
        output, error = soak.communicate(timeout=900)
    assert soak.returncode == 0, output[-5000:] + error[-5000:]
