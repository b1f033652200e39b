"""The ledger gives every second of a run to one class."""

import os

import pytest

from tests.clock import Clock
from ultrascale_jax.launch import watchdog
from ultrascale_jax.launch.events import Events
from ultrascale_jax.launch.goodput import (
    CLASSES,
    Ledger,
    begun_again,
    read_beat,
    read_ledger,
    stacks_path,
)
from ultrascale_jax.launch.watchdog import Watch


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(watchdog, "_process_age_s", lambda: 3.0)
    return Clock(monkeypatch)


def tries(run_dir, body, *, killed=False, **options):
    """Run `body(watch)` in a process of a run, which is `killed` at its end."""
    watch = Watch(Events(run_dir, 0), **options)
    watch.__enter__()
    body(watch)
    watch._write()
    last = (run_dir / "heartbeats/0").read_bytes()
    watch.__exit__(None, None, None)
    if killed:
        (run_dir / "heartbeats/0").write_bytes(last)


def seconds(run_dir):
    return {name: s for name, s in read_ledger(run_dir).seconds.items() if s}


def test_one_run_without_restarts_is_cut_at_its_sections(tmp_path, clock):
    def body(watch):
        clock.sleep(1.0)
        with watch.section("restore"):
            clock.sleep(2.0)
        watch.begin(0)
        clock.sleep(0.5)
        with watch.section("compile"):
            clock.sleep(10.0)
        clock.sleep(1.0)
        watch.beat(1)
        with watch.data(lambda: False):
            clock.sleep(2.0)
        with watch.data(lambda: True):
            clock.sleep(1.0)
        clock.sleep(8.0)
        watch.beat(2)
        with watch.section("save"):
            clock.sleep(0.5)
        with watch.section("evaluate"):
            clock.sleep(1.0)

    tries(tmp_path, body)
    told = {"productive": 9.0, "start-up": 6.0, "compile": 11.5}
    told |= {"checkpoint": 0.5, "data": 2.0, "evaluation": 1.0}
    assert seconds(tmp_path) == pytest.approx(told)
    ledger = read_ledger(tmp_path)
    assert ledger.total_s == pytest.approx(30.0) and ledger.goodput == pytest.approx(9.0 / 30.0)
    assert (ledger.steps, ledger.steps_again, ledger.restarts) == (2, 0, 0)


def steps(clock, first, last, tail=0.0, section="step"):
    """Steps of a second each, and `tail` seconds in a section behind them."""

    def body(watch):
        watch.begin(first)
        for step in range(first + 1, last + 1):
            clock.sleep(1.0)
            watch.beat(step)
        if section != "step":
            watch._enter(section)
        clock.sleep(tail)

    return body


def test_a_killed_process_lasts_until_its_last_progress_and_its_steps_are_done_again(
    tmp_path, clock
):
    tries(tmp_path, steps(clock, 0, 5, tail=0.5), killed=True)
    # Its start and the first step, which is its warm-up; half a step was lost.
    assert seconds(tmp_path) == pytest.approx({"start-up": 3.0, "compile": 1.0, "productive": 4.0})
    clock.sleep(7.0)
    tries(tmp_path, steps(clock, 3, 8))
    told = {"start-up": 6.0, "compile": 2.0, "productive": 7.0, "again": 1.0, "down": 4.5}
    assert seconds(tmp_path) == pytest.approx(told)
    ledger = read_ledger(tmp_path)
    assert ledger.total_s == pytest.approx(clock.now - 1e9 + 3.0)
    assert (ledger.steps, ledger.steps_again, ledger.restarts) == (8, 2, 1)
    assert "1 restart, 2 steps again" in ledger.line()
    lines = ledger.table().splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [*CLASSES, "total"]
    assert lines[-1] == "8 steps, 2 again, 1 restart"


@pytest.mark.parametrize(("section", "kind"), [("save", "checkpoint"), ("compile", "compile")])
def test_a_process_that_dies_in_another_section_was_in_it_unless_it_hung(
    tmp_path, clock, section, kind
):
    tries(tmp_path, steps(clock, 0, 2, tail=60.0, section=section), killed=True)
    assert seconds(tmp_path)[kind] == pytest.approx(60.0 + (kind == "compile"))
    stacks = stacks_path(tmp_path, 1, 0)
    stacks.write_text("Timeout")
    os.utime(stacks, (clock.now + 1.0,) * 2)
    assert seconds(tmp_path)["hang"] == pytest.approx(61.0)
    # The stacks of an earlier hang say nothing.
    os.utime(stacks, (1e9,) * 2)
    assert "hang" not in seconds(tmp_path)


def test_the_time_after_a_finished_run_is_not_its_own_and_after_a_stopped_one_it_is(
    tmp_path, clock
):
    def stopped(watch):
        steps(clock, 0, 2)(watch)
        watch.reason = "stopped"

    tries(tmp_path, stopped)
    clock.sleep(100.0)
    tries(tmp_path, steps(clock, 2, 4))
    assert seconds(tmp_path)["down"] == pytest.approx(97.0)
    clock.sleep(1000.0)
    tries(tmp_path, steps(clock, 4, 5))
    assert seconds(tmp_path)["down"] == pytest.approx(97.0)
    assert read_ledger(tmp_path).restarts == 2
    # A run that begins anew begins a new ledger.
    tries(tmp_path, steps(clock, 0, 1), fresh=True)
    assert seconds(tmp_path) == pytest.approx({"start-up": 3.0, "compile": 1.0})


def test_two_runs_of_one_process_and_a_clock_that_is_set_count_no_second_twice(tmp_path, clock):
    tries(tmp_path, steps(clock, 0, 2))
    clock.sleep(1.0)
    tries(tmp_path, steps(clock, 2, 3))
    assert seconds(tmp_path)["start-up"] == pytest.approx(3.0 + 1.0)
    clock.now -= 3600.0
    assert begun_again(tmp_path, 0, 3.0).seconds["down"] == 0.0


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": 1}', '{"pid": "x", "step": []}'])
def test_a_heartbeat_that_cannot_be_read_is_none(tmp_path, text):
    (tmp_path / "heartbeats").mkdir()
    (tmp_path / "heartbeats/0").write_text(text)
    assert read_beat(tmp_path) is None and read_ledger(tmp_path) == Ledger()
