"""A suspicious step is taken twice: equal bits mean the data or the model, different ones a device."""

import weakref

from tests.faults.tiny import config as TINY
from tests.runs import change, run, step_rows
from ultrascale_jax.hooks import Hook
from ultrascale_jax.launch.events import read_events

BASE = change(
    TINY,
    mesh={"fsdp": 2},
    model={"num_layers": 1},
    optim={"warmup_steps": 0},
    watch={"rerun": True, "spike_sigma": 40.0, "spike_window": 4},
)


class FirstState(Hook):
    """Finds out whether something still holds the state that the run began with."""

    def on_start(self, run):
        self._norm = weakref.ref(run.state.params.final_norm[...])

    def before_step(self, run):
        self.is_kept = self._norm() is not None


def reruns(folder):
    return [event for event in read_events(folder) if event["kind"] == "rerun"]


def test_a_transient_fault_is_told_and_leaves_no_trace(tmp_path):
    first_state = FirstState()
    run(BASE, tmp_path / "faulty", ("nan", 6), ("spike", 9), hooks=[first_state])
    assert not first_state.is_kept
    run(BASE, tmp_path / "sound")
    losses = [[row["loss"] for row in step_rows(tmp_path / name)] for name in ("faulty", "sound")]
    assert losses[0] == losses[1]
    verdicts = [(e["step"], e["verdict"], e["skipped"]) for e in reruns(tmp_path / "faulty")]
    assert verdicts == [(step, "transient", [True, False]) for step in (6, 9)]
    assert reruns(tmp_path / "sound") == []


def test_a_fault_that_comes_back_is_persistent_and_the_step_is_skipped(tmp_path):
    """A model that has diverged gives the same bits twice."""
    cfg = change(BASE, optim={"lr": 1e30, "clip_norm": 0.0}, train={"steps": 4})
    summary = run(cfg, tmp_path / "run")
    verdicts = [event["verdict"] for event in reruns(tmp_path / "run")]
    assert summary["skipped"] == len(verdicts) > 0 and set(verdicts) == {"persistent"}
