"""The ledger gives every second of a run to one class."""

import json
import math

import pytest

from ultrascale_jax.launch.goodput import CLASSES, read_ledger


def write(run_dir, *rows, **heartbeat):
    rows = [{"rank": 0, "attempt": 0, **row} for row in rows]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if heartbeat:
        beat = {"pid": 1, "step": 0, "furthest": 0, "section": "step", "bound_s": 60.0}
        beat |= {"monotonic": 0.0, "data_wait_s": 0.0} | heartbeat
        (run_dir / "heartbeats").mkdir(exist_ok=True)
        (run_dir / "heartbeats/0").write_text(json.dumps(beat))


def start(time, began, **details):
    return {"time": time, "kind": "start", "age_s": time - began, **details}


def section(time, name, step, waited=0.0):
    return {"time": time, "kind": "section", "name": name, "step": step, "data_wait_s": waited}


def end(time, step, reason="done", waited=0.0):
    return {"time": time, "kind": "end", "step": step, "reason": reason, "data_wait_s": waited}


def supervised(time, kind, **details):
    return {"time": time, "kind": kind, "rank": None, "ranks": [0, 1], **details}


def seconds(run_dir):
    return {name: s for name, s in read_ledger(run_dir).seconds.items() if s}


def test_one_run_without_restarts_is_cut_at_its_sections(tmp_path):
    write(
        tmp_path,
        start(103.0, began=100.0),
        section(104.0, "restore", 0),
        section(106.0, "start", 0),
        section(107.0, "warm-up", 0),
        section(107.5, "compile", 0, waited=0.5),
        section(117.5, "warm-up", 0, waited=0.5),
        section(118.5, "step", 0, waited=0.5),
        section(127.5, "save", 10, waited=2.5),
        section(128.0, "step", 10, waited=2.5),
        section(138.0, "evaluate", 20, waited=2.5),
        section(139.0, "step", 20, waited=2.5),
        end(139.5, 20, waited=2.5),
    )
    ledger = read_ledger(tmp_path)
    told = {"productive": 17.5, "start-up": 7.0, "compile": 11.0}
    told |= {"checkpoint": 0.5, "data": 2.5, "evaluation": 1.0}
    assert seconds(tmp_path) == pytest.approx(told)
    assert ledger.total_s == pytest.approx(39.5) and ledger.goodput == pytest.approx(17.5 / 39.5)
    assert (ledger.steps, ledger.steps_again, ledger.restarts) == (20, 0, 0)


KILLED = [
    supervised(99.0, "spawn"),
    start(103.0, began=99.0),
    section(104.0, "step", 0),
    section(108.0, "save", 4),
    section(109.0, "step", 4),
]
"""A first try; its last step was read at 113."""

SIGN = {"time": 113.0, "step": 8, "furthest": 8, "data_wait_s": 1.0}
AGAIN = [
    supervised(116.0, "exit", before=SIGN),
    supervised(118.0, "spawn", before=SIGN),
    start(120.0, began=118.0, before=SIGN),
    section(121.0, "again", 4),
    section(125.0, "step", 8),
    section(129.0, "evaluate", 12),
    section(130.0, "step", 12),
    end(130.0, 12),
    supervised(132.0, "exit"),
]


def test_a_killed_process_lasts_until_its_last_sign_and_is_then_waited_for(tmp_path):
    write(tmp_path, *KILLED, *AGAIN)
    told = {"productive": 4.0 + 3.0 + 4.0, "again": 4.0, "start-up": 5.0 + 3.0 + 2.0}
    told |= {"checkpoint": 1.0, "data": 1.0, "hang": 3.0, "down": 2.0, "evaluation": 1.0}
    assert seconds(tmp_path) == pytest.approx(told)
    ledger = read_ledger(tmp_path)
    assert ledger.total_s == pytest.approx(33.0)
    assert (ledger.steps, ledger.steps_again, ledger.restarts) == (12, 4, 1)
    assert "1 restart, 4 steps again" in ledger.line()
    lines = ledger.table().splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [*CLASSES, "total"]
    assert lines[-2].split() == ["total", "33.0", "s"]
    assert lines[-1] == "12 steps, 4 again, 1 restart"


def test_without_a_supervisor_the_time_between_tries_is_down(tmp_path):
    alone = [row for row in KILLED + AGAIN if row["kind"] not in ("spawn", "exit")]
    write(tmp_path, *alone)
    told = seconds(tmp_path)
    assert told["down"] == pytest.approx(118.0 - 113.0) and "hang" not in told
    assert read_ledger(tmp_path).total_s == pytest.approx(130.0 - 99.0)


def test_a_run_that_is_under_way_is_known_up_to_its_last_sign(tmp_path):
    """Also where the clock was set back before it."""
    set_back = {"time": 113.0 - 3600, "monotonic": 1113.0, "boot": "b"}
    for rows, last in ((KILLED, {"time": 113.0}), (stamped(KILLED), set_back)):
        write(tmp_path, *rows, step=8, furthest=8, **last)
        told = {"productive": 4.0 + 4.0, "start-up": 5.0, "checkpoint": 1.0}
        assert seconds(tmp_path) == pytest.approx(told)
        assert read_ledger(tmp_path).steps == 8


@pytest.mark.parametrize("hung", [False, True])
def test_a_process_that_dies_in_another_section_was_in_it_unless_it_hung(tmp_path, hung):
    sign = {"time": 108.0, "step": 4, "furthest": 4, "data_wait_s": 0.0}
    stuck = [{"time": 167.0, "kind": "hang", "section": "save"}] if hung else []
    write(tmp_path, *KILLED[:4], *stuck, supervised(168.0, "exit", before=sign))
    assert seconds(tmp_path)["hang" if hung else "checkpoint"] == pytest.approx(60.0)


def test_the_time_after_a_finished_run_is_not_its_own_and_after_a_stopped_one_it_is(tmp_path):
    def two_tries(reason):
        first = [start(101.0, 100.0), section(102.0, "step", 0), end(110.0, 8, reason)]
        return [*first, start(502.0, 500.0), section(503.0, "step", 8), end(511.0, 16)]

    write(tmp_path, *two_tries("done"))
    assert read_ledger(tmp_path).total_s == pytest.approx(10.0 + 11.0)
    write(tmp_path, *two_tries("stopped"))
    assert seconds(tmp_path)["down"] == pytest.approx(390.0)


def test_a_run_that_begins_anew_begins_a_new_ledger(tmp_path):
    anew = [supervised(200.0, "spawn"), start(203.0, 200.0, fresh=True), section(204.0, "step", 0)]
    write(tmp_path, *KILLED, supervised(116.0, "exit", before=SIGN), *anew, end(214.0, 5))
    assert seconds(tmp_path) == pytest.approx({"start-up": 4.0, "productive": 10.0})
    assert read_ledger(tmp_path).restarts == 0


def test_other_hosts_supervisors_and_a_clock_that_is_set_back_add_nothing(tmp_path):
    other = {"time": 105.0, "kind": "exit", "rank": None, "ranks": [2, 3]}
    write(tmp_path, *KILLED, other, *AGAIN)
    assert read_ledger(tmp_path).total_s == pytest.approx(33.0)
    write(tmp_path, start(103.0, began=200.0), section(104.0, "step", 0), end(110.0, 2))
    assert seconds(tmp_path) == pytest.approx({"start-up": 1.0, "productive": 6.0})


def stamped(rows, boot="b", uptime=1000.0):
    """The rows of a machine that was started `uptime` seconds before time 0, with its monotonic times."""
    made = []
    for row in rows:
        row = row | {"boot": boot, "monotonic": row["time"] + uptime}
        if "before" in row:
            (row["before"],) = stamped([row["before"]], boot, uptime)
        made.append(row)
    return made


def set_clock(rows, first, by):
    """The rows of a machine whose clock is set by so many seconds before row `first`."""
    moved = []
    for number, row in enumerate(rows):
        row = dict(row)
        if number >= first:
            row |= {"time": row["time"] + by}
        moved.append(row)
    return moved


@pytest.mark.parametrize("by", [-3600.0, 3600.0])
def test_a_clock_that_is_set_takes_no_second_and_adds_none(tmp_path, by):
    rows = stamped(KILLED + AGAIN)
    write(tmp_path, *rows)
    right = read_ledger(tmp_path)
    assert right.total_s == pytest.approx(33.0)
    for first in range(1, len(rows)):
        write(tmp_path, *set_clock(rows, first, by))
        ledger = read_ledger(tmp_path)
        assert ledger.seconds == pytest.approx(right.seconds), first
        assert ledger.steps_again == right.steps_again


def test_another_machine_whose_clock_is_behind_leaves_no_gap_and_no_overlap(tmp_path):
    again = [row for row in AGAIN if row["kind"] not in ("spawn", "exit")]
    behind = set_clock(stamped(again, "c", 5.0), 0, -500.0)
    behind[0] = behind[0] | {"before": stamped([SIGN])[0]}
    write(tmp_path, *stamped(KILLED), *behind)
    # To the last sign on the first machine, and from the start of the process on the second.
    assert read_ledger(tmp_path).total_s == pytest.approx((113.0 - 99.0) + (130.0 - 118.0))
    assert seconds(tmp_path)["again"] == pytest.approx(4.0)


def test_an_event_that_was_written_late_is_in_its_place(tmp_path):
    rows = stamped(KILLED + AGAIN)
    write(tmp_path, *rows)
    right = seconds(tmp_path)
    write(tmp_path, *rows[:5], rows[7], rows[8], rows[5], rows[6], *rows[9:])
    assert seconds(tmp_path) == pytest.approx(right)


def test_hostile_events_make_no_more_than_a_wrong_ledger(tmp_path):
    rows = [
        start(100.0, 0.0, before=[1]) | {"age_s": "x"},
        start(100.5, 0.0, before={"time": 1.0, "boot": [1]}, boot={}, monotonic="x")
        | {"age_s": True},
        section(100.7, "step", 0) | {"boot": "b", "monotonic": math.inf},
        section(100.8, "step", 0) | {"boot": "b", "monotonic": -1e9},
        section(101.0, ["step"], {}, waited="y"),
        {"time": 102.0, "kind": "exit", "ranks": 0},
        supervised(103.0, "exit", before={"time": "z", "step": None}),
        {"time": 104.0, "kind": "end"},
    ]
    write(tmp_path, *rows)
    assert math.isfinite(read_ledger(tmp_path).total_s)
