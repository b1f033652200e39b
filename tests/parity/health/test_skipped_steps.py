"""A step that is not finite changes no bit of the state, on any mesh and for any optimizer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.faults.tiny import config as TINY
from tests.runs import bits, change, mesh_of
from tests.states import some_state
from ultrascale_jax.config import Experts
from ultrascale_jax.health.skipped_steps import reason, suspicious
from ultrascale_jax.train_step.objective import Sums
from ultrascale_jax.train_step.step import apply_gradients

BASE = change(
    TINY,
    mesh={"fsdp": 1},
    model={"num_layers": 1},
    watch={"spike_sigma": 40.0, "spike_window": 4},
    optim={"warmup_steps": 0},
)
PATHS = {
    "fp16": {"train": {"precision": "fp16"}},
    "pipeline with rounded moments": {
        "mesh": {"pp": 2, "dp": 2},
        "model": {"num_layers": 3},
        "train": {"microbatches": 2},
        "optim": {"moment_dtype": "bfloat16", "stochastic_rounding": True},
    },
    "muon with experts": {
        "model": {"experts": Experts(num=4, top_k=2, bias=True)},
        "mesh": {"ep": 2, "fsdp": 2},
        "optim": {"name": "muon"},
    },
}


def with_huge_moments(state):
    """The state with first moments that are finite, but too large to be divided by the root of the second."""

    def huge(path, x):
        first = jnp.issubdtype(x.dtype, jnp.floating) and ".nu" not in jax.tree_util.keystr(path)
        return jnp.full_like(x, 3e38) if first else x

    opt_state = jax.tree_util.tree_map_with_path(huge, state.opt_state)
    return dataclasses.replace(state, opt_state=opt_state)


@pytest.mark.parametrize("path", PATHS)
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
    if "experts" in path:
        biases = [s.params.stacks[0].moe.bias[...] for s in (good, state)]
        assert bits(biases[0]) != bits(biases[1])
