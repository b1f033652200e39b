"""`events.jsonl`: whole lines from many writers, and no fault of the disk or of a line that stops a run."""

import json
import math
import os
import threading

from ultrascale_jax.launch.events import (
    ATTEMPT,
    FILE_NAME,
    Events,
    read_events,
    to_json,
)


def test_lines_of_many_writers_do_not_mix(tmp_path):
    def write(rank):
        for n in range(200):
            Events(tmp_path, rank).record("row", n=n, filling="x" * 5000)

    writers = [threading.Thread(target=write, args=(rank,)) for rank in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    rows = [(event["rank"], event["n"]) for event in read_events(tmp_path)]
    assert sorted(rows) == [(rank, n) for rank in range(3) for n in range(200)]


def test_a_line_that_is_no_event_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv(ATTEMPT, "2")
    events = Events(tmp_path, rank=0)
    events.record("first")
    with open(tmp_path / FILE_NAME, "a") as file:
        file.write('{"time": 1.0, "ki\n[1]\n{"time": "x", "kind": "y"}\n{"time": 1}\n')
        for number in ("9" * 5000, "9" * 400, "NaN", "Infinity", "true", "[" * 5000):
            file.write(f'{{"time": {number}, "kind": "z"}}\n')
        file.write(f'{{"time": 1.0, "kind": "z", "step": {"9" * 5000}}}\n')
    events.record("second")
    first, second = read_events(tmp_path)
    assert (first["kind"], second["kind"]) == ("first", "second")
    assert (first["rank"], first["attempt"], first["pid"]) == (0, 2, os.getpid())
    assert read_events(tmp_path / "nothing") == []


def test_a_disk_that_takes_or_gives_no_event_stops_nothing(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    Events(tmp_path / "file", rank=0).record("saved")
    assert "event saved was not written" in capsys.readouterr().err
    # Links that lead to each other: an OSError for everybody, root too.
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(tmp_path / FILE_NAME)
    assert read_events(tmp_path) == []
    (tmp_path / "run" / FILE_NAME).mkdir(parents=True)
    assert read_events(tmp_path / "run") == []
    assert "cannot be read: " in capsys.readouterr().err


def test_numbers_that_are_not_finite_are_null_at_any_depth():
    row = {"loss": math.nan, "none": None, "losses": [math.inf, {"mean": -math.inf, "n": 1}]}
    assert json.loads(to_json(row)) == {"loss": None, "losses": [None, {"mean": None, "n": 1}]}
