"""A process's heartbeat, its sections and their limits. tests/e2e/launch/test_watchdog.py has processes that hang."""

import json
import os

import pytest

from tests.processes import wait_for
from ultrascale_jax.launch.events import Events, read_events
from ultrascale_jax.launch.watchdog import (
    DATA_FLOOR_S,
    FIRST_S,
    FLOOR_S,
    SAVE_FLOOR_S,
    Watch,
    last_sign,
    read_beat,
)


def sections(run_dir):
    return [
        (event["name"], event["step"])
        for event in read_events(run_dir)
        if event["kind"] == "section"
    ]


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
    bounded = Watch(Events(tmp_path, 0), hang_s=5.0)
    assert bounded._bound_s("step") == bounded._bound_s("save") == 5.0
    for name in ("compile", "warm-up"):
        assert bounded._bound_s(name) == FIRST_S[name]


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
    for hostile in ("9" * 5000, "9" * 400, "NaN", "Infinity", "true", "[" * 5000):
        path.write_text(json.dumps(sound | {name: "?"}).replace('"?"', hostile))
        assert read_beat(tmp_path, 0) is None and last_sign(tmp_path) == {}
