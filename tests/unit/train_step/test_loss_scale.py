"""Float16: the loss scale falls and grows as it should, and the run is that of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoints import save
from tests.fp16 import BASE
from tests.runs import change, in_folder, mesh_of, saved_state
from tests.states import some_state
from ultrascale_jax.health import skipped_steps
from ultrascale_jax.health.skipped_steps import Diverged
from ultrascale_jax.train_step import loss_scale
from ultrascale_jax.train_step.guards import Verdict, after
from ultrascale_jax.train_step.loss_scale import LossScale
from ultrascale_jax.train_step.state import abstract_state
from ultrascale_jax.training.loop import train
from ultrascale_jax.training.setup import make_loader


def with_infinite_norm(state):
    norm = state.params.final_norm[...]
    leaves = [jnp.full_like(x, jnp.inf) if x is norm else x for x in jax.tree.leaves(state)]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


@pytest.fixture(scope="module", autouse=True)
def short_interval():
    """Three good steps double it, not 2,000."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
        yield


def test_it_doubles_after_three_steps_without_overflow_and_halves_at_one():
    def follow(scale, oks):
        state, found = LossScale(jnp.float32(scale), jnp.int32(0)), []
        for ok in oks:
            state = state.after(jnp.array(ok))
            found.append((float(state.scale), int(state.good_steps)))
        return found

    assert follow(8, [True, True, True, True, False, True, True, True]) == [
        *[(8, 1), (8, 2), (16, 0), (16, 1), (8, 0), (8, 1), (8, 2), (16, 0)]
    ]
    least, most = loss_scale.LEAST, loss_scale.MOST
    assert follow(least, [False]) == [(least, 0)]
    assert follow(most, [True, True, True]) == [(most, 1), (most, 2), (most, 0)]


def test_a_batch_without_targets_does_not_count_for_it():
    before = some_state(BASE, mesh_of(BASE))
    good = Verdict(finite=jnp.array(True), ok=jnp.array(True), spike=None)
    for targets, good_steps in ((0, 0), (1, 1)):
        state = after(before, good, jnp.float32(1), jnp.float32(1), jnp.int32(targets))
        assert int(state.loss_scale.good_steps) == good_steps


def test_the_loop_counts_as_the_state_does(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_scale, "FIRST", 4.0)
    monkeypatch.setattr(skipped_steps, "MOST_IN_A_ROW", 2)
    cfg = in_folder(BASE, tmp_path)
    state = with_infinite_norm(some_state(cfg, mesh_of(cfg)))
    save(cfg, state, 1, fingerprint=make_loader(cfg).fingerprint)
    with pytest.raises(
        Diverged, match=r"2 steps in a row up to step 5, first in the parameters final_norm"
    ):
        train(cfg, mesh_of(cfg))


def test_a_checkpoint_has_it_and_other_types_may_take_over(tmp_path, monkeypatch):
    cfg, mesh, first = in_folder(BASE, tmp_path), mesh_of(BASE), loss_scale.FIRST
    with monkeypatch.context() as patch:
        patch.setattr(loss_scale, "FIRST", first / 2)
        save(cfg, some_state(cfg, mesh), 1)
    state = saved_state(cfg, tmp_path, 1)
    assert float(state.loss_scale.scale) == first / 2
    other = change(cfg, train={"precision": "bf16"})
    plain = saved_state(other, tmp_path, 1)
    assert plain.loss_scale is None
    assert jax.tree.structure(plain) == jax.tree.structure(abstract_state(other, mesh))
    save(other, plain, 17)
    again = saved_state(cfg, tmp_path, 17)
    assert float(again.loss_scale.scale) == first
    for x, y in zip(jax.tree.leaves(again.params), jax.tree.leaves(state.params), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
