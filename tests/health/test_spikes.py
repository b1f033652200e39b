"""Steps that are skipped: which ones, that they change nothing, and what is kept of them."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.faults.tiny import config as TINY
from tests.runs import bits, change, mesh_of, run, saved_state, step_rows
from tests.states import some_state
from ultrascale_jax.checkpoint.manager import Checkpoints
from ultrascale_jax.checkpoint.step_dirs import steps
from ultrascale_jax.config import Experts, WatchConfig
from ultrascale_jax.health import skipped_steps
from ultrascale_jax.health.skipped_steps import Diverged, reason, suspicious
from ultrascale_jax.launch.events import read_events
from ultrascale_jax.train_step.objective import Sums
from ultrascale_jax.train_step.spikes import Spikes
from ultrascale_jax.train_step.state import abstract_state
from ultrascale_jax.train_step.step import apply_gradients
from ultrascale_jax.training.setup import make_loader

BASE = change(
    TINY,
    mesh={"fsdp": 1},
    model={"num_layers": 1},
    watch={"spike_sigma": 40.0, "spike_window": 4},
    optim={"warmup_steps": 0},
    checkpoint={"every": 0},
)


def spiky(window, sigma, values):
    """The rule as a loop over the accepted steps."""
    accepted, skipped = [], []
    for value in values:
        recent = np.array(accepted[-window:], np.float32)
        full = len(accepted) >= window
        leaps = full and bool((value > recent.mean(0) + sigma * recent.std(0)).any())
        skipped.append(leaps)
        accepted += [] if leaps else [value]
    return skipped


@pytest.mark.parametrize(("window", "sigma"), [(4, 3.0), (8, 2.5), (16, 3.0)])
def test_a_step_is_skipped_when_it_leaps_above_the_window_of_accepted_ones(window, sigma):
    values = np.random.default_rng(window).normal(size=(200, 2)).astype(np.float32)
    values[::17] += 20.0
    values[30:60, 1] += 1.0
    spikes = Spikes.start(WatchConfig(spike_sigma=sigma, spike_window=window))

    @jax.jit
    def step(spikes, value):
        leaps = spikes.is_spike(*value, sigma)
        return spikes.after(~leaps, *value), leaps

    found = []
    for value in values:
        spikes, leaps = step(spikes, value)
        found.append(bool(leaps))
    assert found == spiky(window, sigma, values)
    assert not any(found[:window]) and 10 < sum(found) < 150


def test_without_a_threshold_the_state_holds_no_window():
    cfg = change(BASE, watch={"spike_sigma": 0.0, "spike_window": 4})
    assert Spikes.start(cfg.watch) is None
    assert abstract_state(cfg, mesh_of(cfg)).spikes is None


PATHS = {
    "adamw": {},
    "zero over a mesh": {"mesh": {"fsdp": 2, "dp": 2}},
    "pipeline": {"mesh": {"pp": 2}, "model": {"num_layers": 3}, "train": {"microbatches": 2}},
    "fp16": {"train": {"precision": "fp16"}},
    "muon": {"optim": {"name": "muon"}, "mesh": {"fsdp": 2}},
    "stochastic rounding": {"optim": {"moment_dtype": "bfloat16", "stochastic_rounding": True}},
    "experts": {"model": {"experts": Experts(num=4, top_k=2, bias=True)}, "mesh": {"ep": 2}},
}


def with_huge_moments(state):
    """The state with first moments that are finite, but too large to be divided by the root of the second."""

    def huge(path, x):
        first = jnp.issubdtype(x.dtype, jnp.floating) and ".nu" not in jax.tree_util.keystr(path)
        return jnp.full_like(x, 3e38) if first else x

    opt_state = jax.tree_util.tree_map_with_path(huge, state.opt_state)
    return dataclasses.replace(state, opt_state=opt_state)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.wide)
        if path in ("adamw", "muon", "stochastic rounding", "zero over a mesh")
        else path
        for path in PATHS
    ],
)
def test_one_number_that_is_not_finite_changes_no_bit(path):
    """Row 16: in one element of a gradient, in the loss, or in the update that they make."""
    cfg = change(BASE, **PATHS[path])
    mesh = mesh_of(cfg)
    with jax.set_mesh(mesh):
        state = some_state(cfg, mesh)
        step = jax.jit(lambda *args: apply_gradients(cfg, *args))
        rng = np.random.default_rng(0)
        sound = jax.tree.map(
            lambda p: jax.device_put(1e-3 * rng.random(p.shape, np.float32), p.sharding),
            state.params,
        )
        old, values = sound.final_norm[...], np.full(32, 1e-3, np.float32)
        values[3] = np.nan
        new = jax.device_put(values, old.sharding)
        broken = jax.tree.map(lambda g: new if g is old else g, sound)
        batch = {"targets": jnp.zeros((8, 32), jnp.int32)}
        results = [
            step(state, batch, grads, Sums(jnp.float32(loss)))
            for loss, grads in ((1.0, broken), (np.inf, sound), (1.0, sound))
        ]
        huge = with_huge_moments(state)
        after, metrics = step(huge, batch, sound, Sums(jnp.float32(1.0)))
    # Loss and gradients are finite, and the update that the optimizer would make of them is not.
    assert bits((after.params, after.opt_state)) == bits((huge.params, huge.opt_state))
    assert bool(metrics["skipped"]) and suspicious(metrics) and reason(metrics) == "update"
    assert (int(after.skipped_in_a_row), int(after.spikes.accepted)) == (1, 0)
    assert after.loss_scale is None or after.loss_scale.scale == state.loss_scale.scale
    before = bits((state.params, state.opt_state))
    for after, metrics in results[:2]:
        assert bits((after.params, after.opt_state)) == before
        assert bool(metrics["skipped"]) and not bool(metrics["spike"])
        assert (int(after.step), int(after.skipped), int(after.spikes.accepted)) == (1, 1, 0)
        if path == "fp16":
            assert float(after.loss_scale.scale) == float(state.loss_scale.scale) / 2
    good, metrics = results[2]
    assert not bool(metrics["skipped"]) and int(good.spikes.accepted) == 1
    assert bits(good.params.final_norm[...]) != bits(state.params.final_norm[...])
    if path == "experts":
        moved = np.asarray(
            good.params.stacks[0].moe.bias[...] - state.params.stacks[0].moe.bias[...]
        )
        assert np.any(moved)


@pytest.fixture(scope="module")
def spiked(tmp_path_factory):
    """Twelve steps with a spike in the tenth, saved after the eighth."""
    folder = tmp_path_factory.mktemp("spiked")
    run(change(BASE, checkpoint={"every": 4}), folder / "run", ("spike", 10))
    return folder / "run"


@pytest.mark.slow
def test_a_spike_is_skipped_and_its_batch_kept(spiked):
    """Row 17."""
    found = step_rows(spiked)
    assert [row["step"] for row in found if row["skipped"]] == [10]
    assert found[9]["spike"] and found[9]["grad_norm"] > 3 * found[8]["grad_norm"]
    [event] = [event for event in read_events(spiked) if event["kind"] == "skipped"]
    assert (event["step"], event["reason"], event["rows"]) == (10, "spike", [72, 80])
    assert event["batch_hash"] == found[9]["batch_hash"] == make_loader(BASE).batch_hash(9)


@pytest.mark.slow
def test_a_run_that_resumes_has_the_window_and_skips_the_same_step(spiked, tmp_path):
    """Row 17: the window is saved in the checkpoint."""
    shutil.copytree(spiked, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/12")
    (tmp_path / "run/faults.txt").unlink()
    run(change(BASE, checkpoint={"every": 4}), tmp_path / "run", ("spike", 10))
    exact = ("step", "loss", "grad_norm", "skipped")
    assert [[row[name] for name in exact] for row in step_rows(tmp_path / "run")] == [
        [row[name] for name in exact] for row in step_rows(spiked)
    ]
    states = [saved_state(BASE, folder, 12) for folder in (spiked, tmp_path / "run")]
    assert bits(states[0]) == bits(states[1])
    assert int(states[0].spikes.accepted) == 11


@pytest.mark.slow
@pytest.mark.parametrize(
    ("watch", "accepted"),
    [
        ({"spike_sigma": 0.0, "spike_window": 4}, None),
        ({"spike_sigma": 3.0, "spike_window": 4}, 11),
        ({"spike_sigma": 40.0, "spike_window": 8}, 0),
    ],
)
def test_a_run_may_resume_with_another_guard(spiked, watch, accepted):
    cfg = change(BASE, log={"run_dir": str(spiked)}, watch=watch)
    with Checkpoints(cfg) as checkpoints:
        state = checkpoints.restore(12, abstract_state(cfg, mesh_of(cfg)))
    assert (None if state.spikes is None else int(state.spikes.accepted)) == accepted


@pytest.mark.slow
def test_k_steps_in_a_row_stop_the_run_and_leave_their_batches(tmp_path, monkeypatch):
    """Row 16: stop after k with a dump of the batches, and with the checkpoints of good steps."""
    monkeypatch.setattr(skipped_steps, "MOST_IN_A_ROW", 3)
    cfg = change(BASE, checkpoint={"every": 1, "keep": 2})
    faults = (("nan", 2), ("nan", 4), ("nan", 5), ("nan", 6))
    with pytest.raises(Diverged, match=r"not finite in 3 steps in a row up to step 6;") as stopped:
        run(cfg, tmp_path / "run", *faults)
    assert stopped.value.exit_code == 3
    assert steps(tmp_path / "run/checkpoints") == [1, 3]
    assert [row["step"] for row in step_rows(tmp_path / "run") if row["skipped"]] == [2, 4, 5, 6]
    skipped = [e["step"] for e in read_events(tmp_path / "run") if e["kind"] == "skipped"]
    assert skipped == [2, 4, 5, 6]
    kept = json.loads((tmp_path / "run/skipped.json").read_text())
    loader = make_loader(cfg)
    assert [row["step"] for row in kept] == [4, 5, 6]
    for row in kept:
        assert row["batch_hash"] == loader.batch_hash(row["step"] - 1)
        places = [[list(place) for place in one] for one in loader.places(row["step"] - 1)]
        assert row["places"] == places and len(places) == cfg.train.global_batch
    assert str(tmp_path / "run/skipped.json") in str(stopped.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [{"fsdp": 1}, pytest.param({"fsdp": 2, "sp": 2}, marks=pytest.mark.wide)], ids=str
)
def test_a_save_waits_for_the_next_good_step(tmp_path, mesh):
    """The window and the rule are the same wherever they are computed: loss and norm are whole on every device."""
    cfg = change(BASE, mesh=mesh, checkpoint={"every": 10, "keep": 1})
    run(cfg, tmp_path / "run", ("spike", 10), ("spike", 12))
    assert [row["step"] for row in step_rows(tmp_path / "run") if row["skipped"]] == [10, 12]
    # That of step 10 waited; the last one is written in any case, but deletes none.
    assert steps(tmp_path / "run/checkpoints") == [11, 12]
