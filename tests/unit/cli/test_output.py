"""A command that takes long says on stderr that it works, and stdout stays its result alone."""

import contextlib
import io
import json
import re
import threading

import pytest

from tests.processes import wait_for
from ultrascale_jax.cli import output, plan


def test_work_that_takes_longer_is_told_with_its_last_text(monkeypatch):
    monkeypatch.setattr(output, "FIRST_S", 0)
    monkeypatch.setattr(output, "EVERY_S", 0.01)
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), output.working("listing [meshes]") as tell:
        wait_for(stderr.getvalue)
        tell("by formula: 3 of 7")
        wait_for(lambda: "by formula" in stderr.getvalue())
    lines = stderr.getvalue().splitlines()
    assert lines[0] == "listing [meshes] (0 s)" and lines[-1].startswith("by formula: 3 of 7 (")


def test_quick_work_is_not_told_and_an_error_ends_the_telling():
    before, stderr = set(threading.enumerate()), io.StringIO()
    with (
        contextlib.redirect_stderr(stderr),
        pytest.raises(KeyError),
        output.working("reading"),
    ):
        raise KeyError
    assert stderr.getvalue() == "" and set(threading.enumerate()) <= before


def test_a_terminal_shows_the_work_and_stdout_none_of_it(monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    with output.working("listing [meshes]"):
        print("result")
    captured = capsys.readouterr()
    assert captured.out == "result\n" and "listing [meshes]" in captured.err


GUESSES = "smollm2_135m --gpus 2 --json"

VERBS = {
    "memory": f"{GUESSES} --mesh auto",
    "guide": f"{GUESSES}",
    "search": f"{GUESSES} --compile 0",
    "schedule": "--ranks 8 --microbatches 64 --json",
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_of_the_planner_says_that_it_works(verb, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(output, "FIRST_S", 0)
    monkeypatch.chdir(tmp_path)
    plan.main([verb, *VERBS[verb].split()])
    captured = capsys.readouterr()
    assert json.loads(captured.out)["verb"] == verb
    assert re.search(r" \(\d+ s\)\n", captured.err)
