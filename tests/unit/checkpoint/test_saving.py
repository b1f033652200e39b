"""Saves that fail never stop training by themselves. tests/nightly/checkpoint/test_disks.py has disks that fail."""

import shutil
import threading

import pytest

from tests.checkpoints import BASE, state_of
from tests.runs import in_folder
from ultrascale_jax.checkpoint import saving
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.restoring import read_metadata
from ultrascale_jax.checkpoint.run_metadata import describe
from ultrascale_jax.checkpoint.step_dirs import GROUPS, STORE, files
from ultrascale_jax.config import UserError
from ultrascale_jax.launch.events import Events, read_events
from ultrascale_jax.launch.failures import Damaged, NotNow


def meta(step):
    return describe(BASE, step, "data-1")


@pytest.fixture(scope="module")
def state():
    return state_of(0)


def test_a_save_is_on_record_and_none_without_the_arrays_of_a_reader(state, tmp_path):
    with Checkpoints(in_folder(BASE, tmp_path)) as checkpoints:
        checkpoints.save(state, meta(1), wait=True)
    [event] = [row for row in read_events(tmp_path) if row["kind"] == "saved"]
    size = sum(files(tmp_path / "checkpoints/1").values())
    assert (event["step"], event["bytes"]) == (1, size) and event["write_s"] > 0
    for name in (f"{group}/{STORE}" for group in GROUPS):
        place = tmp_path / name / "1"
        shutil.copytree(tmp_path / "checkpoints/1", place)
        (place / name).unlink()
        completed = threading.Event()
        writing = saving.Writing(place, lambda: None, Events(tmp_path, 0), completed.set)
        assert writing.result(60.0) == f"{name} is missing" and not completed.is_set()
        with pytest.raises(Damaged, match=f"{name} is missing"):
            read_metadata(place)


WAY_OUT = r"3 in a row.*cannot write.*Mend .*begins anew, as there is no checkpoint"


def test_after_enough_failures_in_a_row_the_run_ends_with_the_cause_and_the_way_out(
    state, tmp_path
):
    with Checkpoints(in_folder(BASE, tmp_path)) as checkpoints:
        shutil.rmtree(tmp_path / "checkpoints")
        checkpoints.save(state, meta(1))
        checkpoints.save(state, meta(2))
        with pytest.raises(NotNow, match=WAY_OUT) as end:
            checkpoints.save(state, meta(3))
        assert end.value.exit_code == 70 and checkpoints.failures == 3
        (tmp_path / "checkpoints").mkdir()


def test_a_folder_that_is_none_is_refused_for_good(tmp_path, monkeypatch):
    """Row 12: also under a supervisor, since no time mends it."""
    monkeypatch.setenv("ULTRASCALE_ATTEMPT", "1")
    (tmp_path / "checkpoints").touch()
    with pytest.raises(
        UserError, match="/checkpoints: File exists; give this user a place"
    ) as refused:
        Checkpoints(in_folder(BASE, tmp_path))
    assert refused.value.exit_code == 2
