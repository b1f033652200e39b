"""A process's heartbeat, its sections and their limits. tests/e2e/launch/test_watchdog.py has processes that hang."""

import os

import pytest

from tests.clock import Clock
from tests.processes import wait_for
from ultrascale_jax.launch.events import Events, read_events
from ultrascale_jax.launch.goodput import read_beat
from ultrascale_jax.launch.watchdog import DATA_FLOOR_S, FIRST_S, FLOOR_S, SAVE_FLOOR_S, Watch


def test_a_heartbeat_says_where_the_process_is(tmp_path):
    def beat_when(section):
        return wait_for(lambda: (beat := read_beat(tmp_path)).section == section and beat)

    with Watch(Events(tmp_path, 0)) as watch:
        assert read_beat(tmp_path).section == "start"
        watch.begin(4)
        watch.beat(5)
        beat = wait_for(lambda: (beat := read_beat(tmp_path)).step == 5 and beat)
        assert (beat.section, beat.ledger.steps, beat.pid) == ("step", 5, os.getpid())
        with watch.data(lambda: False):
            beat_when("data")
    assert beat_when("end").done
    with pytest.raises(ValueError), Watch(Events(tmp_path, 0)):
        raise ValueError
    assert not beat_when("end").done
    kinds = [(event["kind"], event.get("reason")) for event in read_events(tmp_path)]
    assert kinds == [
        *(("start", None), ("begin", None), ("end", "done")),
        *(("start", None), ("end", "ValueError")),
    ]


def test_the_bound_is_learned_and_one_that_is_given_is_for_repeated_sections(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    watch = Watch(Events(tmp_path, 0))
    watch.begin(0)
    assert watch._bound_s("step") == FIRST_S["step"]
    watch.beat(1)
    assert watch._bound_s("step") == FLOOR_S
    with watch.data(lambda: True):
        assert watch._bound_s("step") == DATA_FLOOR_S
    for step, seconds in enumerate((2.0, 30.0, 7.0), start=2):  # the longest counts, not the last
        clock.sleep(seconds)
        watch.beat(step)
    for name, seconds in (("save", 30.0), ("compare", 40.0), ("compare", 7.0)):
        with watch.section(name):
            clock.sleep(seconds)
    bounds = [watch._bound_s(name) for name in ("step", "save", "compare")]
    assert bounds == [300.0, SAVE_FLOOR_S, 400.0]
    assert watch._bound_s("evaluate") == FIRST_S["evaluate"]
    bounded = Watch(Events(tmp_path, 0), hang_s=5.0)
    assert bounded._bound_s("step") == bounded._bound_s("save") == 5.0
    for name in ("compile", "warm-up"):
        assert bounded._bound_s(name) == FIRST_S[name]


def test_only_rank_0_writes_events_and_no_empty_file_of_stacks_stays(tmp_path):
    with Watch(Events(tmp_path, 1)) as watch:
        watch.begin(0)
    assert read_events(tmp_path) == [] and read_beat(tmp_path, 1) is not None
    assert list((tmp_path / "stacks").iterdir()) == []
