import io
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ultrascale_jax.launch.events import (
    ATTEMPT,
    FILE_NAME,
    Events,
    boot,
    read_events,
    say,
    to_json,
)


def test_an_event_says_who_when_and_what(tmp_path, monkeypatch):
    monkeypatch.setenv(ATTEMPT, "2")
    Events(tmp_path / "run", rank=1).record("saved", step=5, seconds=0.5)
    (event,) = read_events(tmp_path / "run")
    assert (event["kind"], event["rank"], event["attempt"]) == ("saved", 1, 2)
    assert (event["step"], event["seconds"], event["pid"]) == (5, 0.5, os.getpid())
    # Also by a clock that nobody sets, and which start of the machine it counts from.
    assert 0 <= time.monotonic() - event["monotonic"] < 60 and event["boot"] == boot()


def test_lines_of_many_processes_do_not_mix(tmp_path):
    program = (
        "import sys; from ultrascale_jax.launch.events import Events\n"
        f"events = Events({str(tmp_path)!r}, int(sys.argv[1]))\n"
        "for n in range(200): events.record('row', n=n, filling='x' * 5000)\n"
    )
    # Paths from the environment: the processes import the package this test does.
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(rank)], cwd=Path(__file__).parents[2])
        for rank in range(3)
    ]
    try:
        assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    finally:
        for writer in writers:
            writer.kill()
    seen = [(event["rank"], event["n"]) for event in read_events(tmp_path)]
    assert sorted(seen) == [(rank, n) for rank in range(3) for n in range(200)]


HOSTILE = ("9" * 5000, "9" * 400, "NaN", "Infinity", "true", "[" * 5000)
"""Texts in the place of numbers, none of which a process can have written."""


def test_a_line_that_was_cut_short_is_left_out(tmp_path):
    events = Events(tmp_path, rank=0)
    events.record("first")
    with open(tmp_path / FILE_NAME, "a") as file:
        file.write('{"time": 1.0, "ki\n[1]\n{"time": "x", "kind": "y"}\n{"time": 1}\n')
        for number in HOSTILE:
            file.write(f'{{"time": {number}, "kind": "z"}}\n')
        file.write(f'{{"time": 1.0, "kind": "z", "step": {"9" * 5000}}}\n')
    events.record("second")
    assert [event["kind"] for event in read_events(tmp_path)] == ["first", "second"]
    assert read_events(tmp_path / "nothing") == []


def test_a_disk_that_takes_no_event_stops_nothing(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    Events(tmp_path / "file", rank=0).record("saved")
    assert "event saved was not written" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_holds_no_events(tmp_path, capsys):
    # Links that lead to each other: an OSError for everybody, root too.
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(tmp_path / FILE_NAME)
    assert read_events(tmp_path) == []
    (tmp_path / "run" / FILE_NAME).mkdir(parents=True)
    assert read_events(tmp_path / "run") == []
    assert "cannot be read: " in capsys.readouterr().err


def test_what_cannot_be_said_stops_nothing():
    with open("/dev/full", "w") as full:
        say("anything", full)
        with pytest.raises(OSError, match="No space left"):
            print("anything", file=full, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_sign_that_the_console_lacks_is_an_escape_and_a_closed_one_stops_nothing():
    for encoding, shown in (("ascii", b"\\xfc \\udcff\n"), ("utf-8", b"\xc3\xbc \\udcff\n")):
        console = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        say("\u00fc \udcff", console)
        assert console.buffer.getvalue() == shown
        console.close()
        say("anything", console)


def test_numbers_that_are_not_finite_are_null_at_any_depth():
    row = {"loss": math.nan, "none": None, "losses": [math.inf, {"mean": -math.inf, "n": 1}]}
    assert json.loads(to_json(row)) == {"loss": None, "losses": [None, {"mean": None, "n": 1}]}
