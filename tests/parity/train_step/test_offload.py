"""Moments in the host's memory: the same steps, skipped ones too, and checkpoints for either memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.runs import bits, change, mesh_of
from tests.states import some_state
from ultrascale_jax.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    UserError,
)
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.memories import is_on_host
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.train_step.objective import Sums
from ultrascale_jax.train_step.state import TrainState, abstract_state, init_state
from ultrascale_jax.train_step.step import apply_gradients, make_train_step
from ultrascale_jax.training.setup import make_loader

CFG = Config(
    model=ModelConfig(
        vocab_size=64, d_model=32, d_ff=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8
    ),
    data=DataConfig(source="synthetic", seq_len=16),
    optim=OptimConfig(lr=1e-2),
    train=TrainConfig(global_batch=8, precision="fp32"),
)
MATRICES = 7
"""Matrices of a layer."""


def on_mesh(sizes: dict[str, int], **optim) -> Config:
    train = {"zero": 1, "microbatches": 2} if "pp" in sizes else {}
    return change(CFG, mesh={"fsdp": 1} | sizes, train=train, optim=optim)


def num_on_host(state: TrainState) -> int:
    assert not any(map(is_on_host, jax.tree.leaves(state.params)))
    return sum(map(is_on_host, jax.tree.leaves(state.opt_state)))


def trained(cfg: Config, steps: int) -> tuple[list[float], TrainState]:
    mesh, losses = mesh_of(cfg), []
    cfg = cfg.check(mesh.size)
    with jax.set_mesh(mesh):
        state, step, loader = some_state(cfg, mesh), make_train_step(cfg), make_loader(cfg)
        for i in range(steps):
            batch = jax.device_put(loader.batch(i), jax.NamedSharding(mesh, act("BT")))
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    return losses, state


def updated(cfg: Config) -> list[TrainState]:
    """The states after each of two updates with the same gradients, and after one whose gradients are not finite."""
    mesh, rng, states = mesh_of(cfg), np.random.default_rng(1), []
    cfg = cfg.check(mesh.size)
    batch = {"targets": jnp.zeros((8, 16), jnp.int32)}

    def step(state: TrainState, grads: Transformer, loss: jax.Array) -> TrainState:
        return apply_gradients(cfg, state, batch, grads, Sums(loss))[0]

    with jax.set_mesh(mesh):
        state = some_state(cfg, mesh)
        draws = [rng.normal(size=p.shape).astype(p.dtype) for p in jax.tree.leaves(state.params)]
        params, form = jax.tree.flatten(state.params)
        grads = jax.tree.unflatten(
            form, [jax.device_put(g, p.sharding) for g, p in zip(draws, params, strict=True)]
        )
        run = jax.jit(step)
        for loss in (1.0, 1.0, np.inf):
            states.append(state := run(state, grads, jnp.float32(loss)))
    return states


def check_close(state: TrainState, expected: TrainState) -> None:
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-6)


def test_a_run_trains_alike():
    cfg = change(on_mesh({"fsdp": 2}), model={"num_layers": 1})
    (expected, plain), (losses, state) = (
        trained(change(cfg, optim={"offload": which}), 2) for which in ("none", "both")
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert (num_on_host(plain), num_on_host(state)) == (0, 2 * MATRICES)
    check_close(state, plain)


@pytest.mark.parametrize(
    ("sizes", "optim", "which", "number"),
    [
        ({"pp": 2, "fsdp": 2}, {}, "second", MATRICES),
        ({"fsdp": 2}, {"name": "muon", "moment_dtype": "bfloat16"}, "both", MATRICES),
        (
            {"pp": 2, "fsdp": 2},
            {"moment_dtype": "bfloat16", "stochastic_rounding": True, "weight_dtype": "bfloat16"},
            "both",
            2 * MATRICES,
        ),
    ],
    ids=str,
)
def test_an_update_is_the_same_and_a_refused_one_changes_nothing(sizes, optim, which, number):
    cfg = on_mesh(sizes, **optim)
    expected = updated(cfg)
    states = updated(change(cfg, optim={"offload": which}))
    for state, plain in zip(states, expected, strict=True):
        assert num_on_host(state) == number
        check_close(state, plain)
    _, good, refused = states
    assert bits((good.params, good.opt_state)) == bits((refused.params, refused.opt_state))
    assert int(refused.skipped) == 1


def test_a_fresh_state_begins_there():
    cfg = on_mesh({"pp": 2, "fsdp": 2}, offload="both")
    mesh = mesh_of(cfg)
    state, like = init_state(cfg, mesh), abstract_state(cfg, mesh)
    assert num_on_host(state) == 2 * MATRICES
    for x, expected in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        assert (x.shape, x.dtype, x.sharding) == (expected.shape, expected.dtype, expected.sharding)
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves(state.opt_state))


def test_it_is_refused_where_it_means_nothing():
    class Own(Transformer):
        @staticmethod
        def make_optimizer(cfg):
            return optax.sgd(0.1)

    cfg = on_mesh({"fsdp": 2}, offload="both")
    with pytest.raises(UserError, match=r"^optim\.offload='both': Own has an optimizer of its own"):
        abstract_state(cfg, mesh_of(cfg), Own)
