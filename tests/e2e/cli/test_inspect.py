"""A run as `ultrascale inspect` shows it: its checkpoints, its time and its trace."""

import json
import os
import shutil

import jax
import pytest

from tests.checkpoints import BASE, array_files, flip, save, state_of
from tests.runs import in_folder
from ultrascale_jax.cli.inspect import main


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save(in_folder(BASE, folder), state_of(0), 1, 2)
    return folder


@pytest.fixture
def run_dir(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def printed(capsys, *words, code=0):
    """Return what `ultrascale inspect` prints: stdout, or stderr where it refuses."""
    capsys.readouterr()
    if code:
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        assert stop.value.code == code
    else:
        main([str(word) for word in words])
    texts = capsys.readouterr()
    return texts.out if code < 2 else texts.err


def states(capsys, *words, code=0):
    """The state of each checkpoint by its step."""
    found = json.loads(printed(capsys, *words, "--json", code=code))
    assert (found["verb"], found["schema"]) == ("inspect", 1)
    return {row["step"]: row["state"] for row in found["checkpoints"]}


def test_every_checkpoint_has_a_row_and_its_arrays_if_asked(run_dir, capsys):
    first, second = [line for line in printed(capsys, run_dir).splitlines() if "fsdp=2" in line]
    assert first.split("│")[1].strip() == "1" and second.split("│")[1].strip() == "2"
    assert f"jax {jax.__version__}" in first and "complete" in first
    row = json.loads(printed(capsys, run_dir, "--json"))["checkpoints"][0]
    assert row["mesh"]["fsdp"] == 2 and row["versions"]["jax"] == jax.__version__
    assert row["sound"] and row["size_bytes"] > 1000 and row["arrays"] is None
    words = [run_dir, "--checkpoint", 1, "--arrays"]
    [row] = json.loads(printed(capsys, *words, "--json"))["checkpoints"]
    dtype, shape, mark = row["arrays"]["params/embed"]
    assert (dtype, shape, len(mark)) == ("float32", [64, 32], 16)
    [line] = [line for line in printed(capsys, *words).splitlines() if " params/embed " in line]
    assert "(64, 32)" in line and mark in line


def test_verified_ones_are_called_so_and_a_damaged_one_too(run_dir, capsys):
    assert states(capsys, run_dir, "--verify") == {1: "verified", 2: "verified"}
    flip(array_files(run_dir / "checkpoints/2")[0], 1000)
    assert states(capsys, run_dir)[2] == "complete"
    found = states(capsys, run_dir, "--verify", code=1)
    assert found[1] == "verified"
    assert found[2].startswith("DAMAGED: ")
    assert states(capsys, run_dir, "--checkpoint", 2, code=1) == {2: found[2]}
    assert states(capsys, run_dir, "--checkpoint", 1) == {1: "verified"}
    assert "DAMAGED: " in printed(capsys, run_dir, "--checkpoint", 2, code=1)


def test_what_was_put_aside_is_told(run_dir, capsys):
    os.rename(run_dir / "checkpoints/2", run_dir / "checkpoints/2.corrupt")
    assert "2.corrupt was put aside as damaged" in printed(capsys, run_dir)
    os.rename(run_dir / "checkpoints/1", run_dir / "checkpoints/1.corrupt")
    assert "there is no complete checkpoint in " in printed(capsys, run_dir, code=1)


def test_time_is_shown_where_there_are_heartbeats_and_a_trace_that_cannot_be_read_hides_nothing(
    run_dir, capsys
):
    assert json.loads(printed(capsys, run_dir, "--json"))["time"] is None
    (run_dir / "heartbeats").mkdir()
    assert "start-up" in printed(capsys, run_dir)
    assert json.loads(printed(capsys, run_dir, "--json"))["time"]["restarts"] == 0
    (run_dir / "profile").mkdir()
    assert states(capsys, run_dir) == {1: "complete", 2: "complete"}
    main([str(run_dir)])
    assert "note: " in (said := capsys.readouterr().err) and "no finished trace" in said


def test_what_is_not_there_is_refused(run_dir, tmp_path, capsys):
    for words, said in (
        ([tmp_path / "no"], "holds no config.json"),
        ([run_dir, "--trace"], "holds no finished trace"),
        ([run_dir, "--checkpoint", 9], "holds the steps [1, 2]"),
        ([run_dir, "--checkpoint", 1, "--trace"], "leave out one of them"),
    ):
        assert said in printed(capsys, *words, code=2)
