"""Runs that skip steps: the batches that are kept, the resume, and the end after too many."""

import json
import shutil

import pytest

from tests.faults.tiny import config as TINY
from tests.runs import bits, change, mesh_of, run, saved_state, step_rows
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.step_dirs import steps
from ultrascale_jax.health import skipped_steps
from ultrascale_jax.health.skipped_steps import Diverged
from ultrascale_jax.launch.events import read_events
from ultrascale_jax.train_step.state import abstract_state
from ultrascale_jax.training.setup import make_loader

BASE = change(
    TINY,
    mesh={"fsdp": 1},
    model={"num_layers": 1},
    watch={"spike_sigma": 40.0, "spike_window": 4},
    optim={"warmup_steps": 0},
    checkpoint={"every": 4},
)


def skipped(folder):
    return [row["step"] for row in step_rows(folder) if row["skipped"]]


def events(folder):
    return [event for event in read_events(folder) if event["kind"] == "skipped"]


@pytest.fixture(scope="module")
def spiked(tmp_path_factory):
    """Twelve steps with a spike in the tenth, saved after the eighth."""
    folder = tmp_path_factory.mktemp("spiked") / "run"
    run(BASE, folder, ("spike", 10))
    return folder


def test_a_spike_is_skipped_and_its_batch_kept(spiked):
    """Row 17."""
    rows = step_rows(spiked)
    assert skipped(spiked) == [10]
    assert rows[9]["spike"] and rows[9]["grad_norm"] > 3 * rows[8]["grad_norm"]
    [event] = events(spiked)
    assert (event["step"], event["reason"], event["rows"]) == (10, "spike", [72, 80])
    assert event["batch_hash"] == rows[9]["batch_hash"] == make_loader(BASE).batch_hash(9)


def test_a_run_that_resumes_has_the_window_and_skips_the_same_step(spiked, tmp_path):
    """Row 17: the window is saved in the checkpoint."""
    again = tmp_path / "run"
    shutil.copytree(spiked, again)
    shutil.rmtree(again / "checkpoints/12")
    (again / "faults.txt").unlink()
    run(BASE, again, ("spike", 10))
    exact = ("step", "loss", "grad_norm", "skipped")
    rows = [
        [[row[name] for name in exact] for row in step_rows(folder)] for folder in (again, spiked)
    ]
    assert rows[0] == rows[1]
    states = [saved_state(BASE, folder, 12) for folder in (again, spiked)]
    assert bits(states[0]) == bits(states[1]) and int(states[0].spikes.accepted) == 11


@pytest.mark.parametrize(
    ("sigma", "window", "accepted"), [(0.0, 4, None), (3.0, 4, 11), (40.0, 8, 0)]
)
def test_a_run_may_resume_with_another_guard(spiked, sigma, window, accepted):
    watch = {"spike_sigma": sigma, "spike_window": window}
    cfg = change(BASE, log={"run_dir": str(spiked)}, watch=watch)
    with Checkpoints(cfg) as checkpoints:
        state = checkpoints.restore(12, abstract_state(cfg, mesh_of(cfg)))
    assert (None if state.spikes is None else int(state.spikes.accepted)) == accepted


def test_too_many_skipped_steps_in_a_row_stop_the_run_and_leave_their_batches(
    tmp_path, monkeypatch
):
    """Row 16, with the checkpoints of good steps."""
    monkeypatch.setattr(skipped_steps, "MOST_IN_A_ROW", 3)
    cfg = change(BASE, checkpoint={"every": 1, "keep": 2})
    faults = (("nan", 2), ("nan", 4), ("nan", 5), ("nan", 6))
    with pytest.raises(
        Diverged, match=r"in 3 steps in a row up to step 6, first nowhere"
    ) as stopped:
        run(cfg, tmp_path / "run", *faults)
    assert stopped.value.exit_code == 3
    assert steps(tmp_path / "run/checkpoints") == [1, 3]
    assert skipped(tmp_path / "run") == [2, 4, 5, 6]
    assert [event["step"] for event in events(tmp_path / "run")] == [2, 4, 5, 6]
    kept = json.loads((tmp_path / "run/skipped.json").read_text())
    loader = make_loader(cfg)
    assert [row["step"] for row in kept] == [4, 5, 6]
    for row in kept:
        assert row["batch_hash"] == loader.batch_hash(row["step"] - 1)
        places = [[list(place) for place in one] for one in loader.places(row["step"] - 1)]
        assert row["places"] == places and len(places) == cfg.train.global_batch
    assert str(tmp_path / "run/skipped.json") in str(stopped.value)


def test_a_save_waits_for_the_next_good_step(tmp_path):
    cfg = change(BASE, checkpoint={"every": 10, "keep": 1})
    run(cfg, tmp_path / "run", ("spike", 10), ("spike", 12))
    assert skipped(tmp_path / "run") == [10, 12]
    # That of step 10 waited; the last one is written in any case, but deletes none.
    assert steps(tmp_path / "run/checkpoints") == [11, 12]
