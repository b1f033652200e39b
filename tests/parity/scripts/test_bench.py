"""Bare JAX computes the model of the benchmark that it is timed beside."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scripts.bench import bare_jax, trainers
from tests.states import some_state
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.train_step import step as train_step


def test_bare_jax_has_the_loss_and_the_gradients_of_this_projects_model():
    cfg = trainers.config(tiny=True)
    mesh = make_mesh(cfg.mesh, jax.devices()[:1])
    shape = (cfg.train.global_batch, cfg.data.seq_len + 1)
    rows = np.random.default_rng(0).integers(0, cfg.model.vocab_size, shape, np.int32)
    positions = np.broadcast_to(np.arange(cfg.data.seq_len, dtype=np.int32), rows[:, 1:].shape)
    arrays = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "positions": positions}
    with jax.set_mesh(mesh):
        state = some_state(cfg, mesh)
        batch = jax.device_put(arrays, jax.NamedSharding(mesh, act("BT")))
        weight = jnp.float32(1 / rows[:, 1:].size)
        step = jax.jit(lambda params: train_step.gradients(cfg, params, batch, weight))
        gradients, sums = step(state.params)

    def arrays_of(model):
        """Return the arrays by the names of bare JAX."""
        arrays = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
        (stack,) = arrays.pop("stacks").values()
        return arrays | {"blocks": stack}

    ours, ours_grads = arrays_of(state.params), arrays_of(gradients)
    with jax.numpy_rank_promotion("allow"):
        peer_loss, peer_grads = jax.jit(
            jax.value_and_grad(
                lambda params: bare_jax.loss_fn(
                    params, rows[:, :-1], rows[:, 1:], dataclasses.asdict(cfg.model), True
                )
            )
        )(ours)
    np.testing.assert_allclose(peer_loss, sums.loss, rtol=1e-6)
    assert len(jax.tree.leaves(ours)) == 12
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), dict(peer_grads), ours_grads
    )
