"""An optimizer of one's own, and parameters that are not trained: what changes, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ultrascale_jax as us
from tests.parity.own_layers import Lion
from tests.parity.rows import BASE
from tests.runs import change, mesh_of
from tests.states import some_state
from ultrascale_jax.config import UserError
from ultrascale_jax.train_step.step import make_train_step


def step_of(model, **sections):
    """Return the state before and after one step on two devices, and the step's metrics."""
    cfg = change(BASE, mesh={"fsdp": 2}, **sections).check(2)
    mesh = us.make_mesh(cfg.mesh, jax.devices()[:2])
    with jax.set_mesh(mesh):
        state = some_state(cfg, mesh, model=model)
        before = jax.tree.map(jnp.copy, state)
        batch = next(us.make_loader(cfg).device_batches(mesh, 0))[1]
        after, metrics = make_train_step(cfg)(state, batch)
    return before, after, metrics


def paths(state):
    """Return the path of each parameter."""
    leaves = jax.tree.leaves_with_path(state.params)
    paths = (jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
    return [path.removesuffix(".value") for path in paths]


def changed(before, after):
    """Return the paths of the parameters that differ."""
    pairs = zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True)
    return {
        path
        for path, (old, new) in zip(paths(before), pairs, strict=True)
        if not np.array_equal(old, new)
    }


def test_only_trained_parameters_change_and_have_moments_and_a_step_of_lion_is_a_sign():
    before, after, metrics = step_of(Lion, optim={"lr": 1e-3, "warmup_steps": 0})
    names = {name for name in paths(before) if Lion.is_trained(name)}
    assert changed(before, after) == names
    assert len([x for x in jax.tree.leaves(before.opt_state) if x.ndim]) == len(names)
    old, new = (np.asarray(state.params.stacks[0].attn.w_q[...]) for state in (before, after))
    step = (new - old) / 1e-3 + 0.1 * old
    np.testing.assert_allclose(np.abs(step), 1.0, rtol=2e-2)
    assert not metrics["skipped"]


def test_an_update_that_is_not_finite_changes_nothing():
    class Divides(us.Transformer):
        @staticmethod
        def make_optimizer(cfg):
            return optax.stateless(lambda updates, _: jax.tree.map(lambda g: g / 0.0, updates))

    before, after, metrics = step_of(Divides)
    assert metrics["skipped"] and not changed(before, after)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"is_trained": lambda path: False}, "model.is_trained='Own': trains no parameter"),
        ({"is_trained": lambda path: path != "w"}, "model.is_trained='Own': freezes no parameter"),
        (
            {"make_optimizer": lambda cfg: optax.adafactor(1e-3, min_dim_size_to_factor=2)},
            "model.make_optimizer='Own': an optimizer's state has arrays in the shapes of",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_first_step(methods, message):
    cfg = change(BASE, mesh={"fsdp": 8}, train={"microbatches": 2}).check(8)
    own = type("Own", (us.Transformer,), {k: staticmethod(f) for k, f in methods.items()})
    with pytest.raises(UserError, match=message):
        us.abstract_state(cfg, mesh_of(cfg), own)
