"""Each recomputation policy keeps what it says, and none changes the gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from tests.faults.tiny import config as TINY
from tests.runs import change
from tests.states import some_state
from ultrascale_jax.config import Keep
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.train_step.step import gradients

NAMED = Keep(saved=("q", "k"), offloaded=("gate", "up"))
CFG = change(TINY, mesh={"fsdp": 2}, model={"num_layers": 4}, data={"seq_len": 128})


def with_policy(policy):
    return dataclasses.replace(CFG, train=dataclasses.replace(CFG.train, remat=policy))


def gradients_by(policy):
    """Gradients of the loss."""
    mesh = make_mesh(CFG.mesh, jax.devices()[:2])
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (8, 129)).astype(np.int32)
    positions = np.tile(np.arange(128, dtype=np.int32), (8, 1))
    with jax.set_mesh(mesh):
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions}
        batch = jax.device_put(batch, NamedSharding(mesh, act("BT")))
        params, weight = some_state(CFG, mesh).params, jnp.float32(1e-3)
        run = functools.partial(gradients, with_policy(policy))
        return jax.jit(run)(params, batch, weight)[0]


# Rows of tests/parity recompute by the policies.
def test_tensors_by_name_change_no_gradient():
    found, expected = gradients_by(NAMED), gradients_by("none")
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))
