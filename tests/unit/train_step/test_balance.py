"""A step tells what its routers did as metrics, and moves biases so that loads even out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.runs import change
from tests.states import random_state, some_state
from ultrascale_jax.config import (
    Config,
    DataConfig,
    Experts,
    LinearAttention,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    TrainConfig,
)
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.health.skipped_steps import reason
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step import balance
from ultrascale_jax.train_step import step as steps
from ultrascale_jax.train_step.objective import count
from ultrascale_jax.train_step.step import position_weight, train_step

LAYERS, NUM = 2, 4
BASE = Config(
    model=ModelConfig(
        vocab_size=32,
        d_model=16,
        d_ff=16,
        num_layers=1 + LAYERS,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        experts=Experts(num=NUM, top_k=1, dense_layers=1, scores="sigmoid", bias=True),
    ),
    mesh=MeshConfig(fsdp=1),
    data=DataConfig(source="synthetic", seq_len=32),
    train=TrainConfig(global_batch=8, precision="fp32", seed=1),
)
ONE_LAYER = change(
    BASE,
    model={"num_layers": 1, "experts": dataclasses.replace(BASE.model.experts, dense_layers=0)},
)
ROUTED = np.array([[9, 2, 3, 2, 20], [4, 4, 0, 8, 8]], np.float32)
"""Loads and sum of entropies of both layers, whose 16 tokens choose once."""


@pytest.fixture(autouse=True)
def mesh():
    mesh = make_mesh(BASE.mesh, jax.devices()[:1])
    with jax.set_mesh(mesh):
        yield mesh


def params_of(cfg: Config) -> Transformer:
    return jax.eval_shape(lambda: Transformer(cfg.model, jax.random.key(0)))


def filled(number: float = 1.0) -> Transformer:
    """Every parameter full of a number."""
    return jax.tree.map(lambda p: jnp.asarray(np.full(p.shape, number, p.dtype)), params_of(BASE))


def test_biases_rise_where_there_was_less_than_the_mean_and_fall_where_there_was_more():
    cfg = dataclasses.replace(BASE, moe=MoEConfig(bias_rate=0.25))
    after = jax.jit(functools.partial(balance.rebalanced, cfg))(filled(), ROUTED)
    signs = [[-1, 1, 1, 1], [0, 0, 1, -1]]  # the mean is 4
    np.testing.assert_array_equal(after.stacks[-1].moe.bias[...], 1 + 0.25 * np.array(signs))
    after.stacks[-1].moe.bias.set_value(jnp.asarray(np.ones((LAYERS, NUM))))
    assert all(np.all(leaf == 1) for leaf in jax.tree.leaves(after))


def test_the_last_rows_are_of_modules_of_multi_token_prediction():
    model = dataclasses.replace(BASE.model, num_layers=LAYERS, mtp_layers=1)
    cfg = dataclasses.replace(BASE, model=model, moe=MoEConfig(bias_rate=0.25))
    params = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params_of(cfg))
    after = jax.jit(functools.partial(balance.rebalanced, cfg))(params, ROUTED)
    np.testing.assert_array_equal(after.stacks[-1].moe.bias[...], [[-0.25, 0.25, 0.25, 0.25]])
    np.testing.assert_array_equal(after.mtp[0].block.moe.bias[...], [0, 0, 0.25, -0.25])


def test_a_pattern_has_experts_in_several_stacks_and_in_some_layers_of_a_row():
    experts = dataclasses.replace(BASE.model.experts, dense_layers=0)
    linear = LinearAttention(rule="mamba2", key_heads=2, value_heads=2, key_dim=4, value_dim=4)
    model = {"pattern": "MEEMEEM*E", "num_layers": 6, "linear": linear, "experts": experts}
    cfg = change(BASE, model=model, moe={"bias_rate": 0.25})
    params = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params_of(cfg))
    chosen = np.array([0, 1, 2, 3, 0])  # by all tokens, in the layer
    routed = np.pad(16 * np.eye(NUM, dtype=np.float32)[chosen], ((0, 0), (0, 1)))
    after = jax.jit(functools.partial(balance.rebalanced, cfg))(params, routed)
    rows, _, last = after.stacks
    for bias, layers in (
        (rows.layers[0].moe.bias, [0, 2]),
        (rows.layers[1].moe.bias, [1, 3]),
        (last.moe.bias, [4]),
    ):
        np.testing.assert_array_equal(bias[...], np.where(routed[layers, :NUM], -0.25, 0.25))


def test_only_the_bias_of_a_choice_moves_and_only_where_a_model_has_one():
    """A trained bias of the router (gpt-oss) has the same dims."""
    experts = Experts(num=NUM, top_k=1, biases=True)
    model = dataclasses.replace(BASE.model, num_layers=LAYERS, experts=experts)
    cfg = dataclasses.replace(BASE, model=model)
    params = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params_of(cfg))
    assert balance.rebalanced(cfg, params, ROUTED) is params
    both = dataclasses.replace(experts, bias=True)
    cfg = dataclasses.replace(BASE, model=dataclasses.replace(model, experts=both))
    params = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params_of(cfg))
    after = jax.jit(functools.partial(balance.rebalanced, cfg))(params, ROUTED)
    assert np.any(after.stacks[-1].moe.bias[...])
    assert not np.any(after.stacks[-1].moe.b_router[...])


BALANCED = MoEConfig(aux_weight=1.0, aux_over="sequence", z_loss=0.1)


def loader_batch(cfg: Config, step: int = 0) -> dict[str, np.ndarray]:
    return Loader(cfg.data, vocab_size=32, global_batch=8, seed=0).batch(step)


def test_the_losses_of_routers_have_their_weight_whatever_the_mask():
    """Also where micro-batches differ in their targets: the gradient with these losses less the one without them."""
    cfg = change(ONE_LAYER, train={"microbatches": 2})

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(moe, state, batch):
        run = dataclasses.replace(cfg, moe=moe)
        weight = position_weight(state, batch)
        grads, _ = steps.gradients(run, state.params, batch, weight)
        return jax.tree.map(lambda g: g * batch["targets"].size / count(batch), grads)

    state, batch = some_state(cfg, jax.sharding.get_mesh()), loader_batch(cfg)
    few = np.arange(8)[:, None] % 4 == np.arange(32) % 10
    found = []
    for targets in (batch["targets"], np.where(few, batch["targets"], -1)):
        masked = batch | {"targets": targets.astype(np.int32)}
        pair = (gradients(moe, state, masked) for moe in (BALANCED, MoEConfig()))
        found.append(
            jax.tree.map(lambda a, b: np.asarray(a - b), *pair).stacks[-1].moe.w_router[...]
        )
    assert np.abs(found[0]).max() > 0.01
    np.testing.assert_allclose(found[1], found[0], atol=1e-5 * np.abs(found[0]).max())


def test_a_batch_without_targets_changes_nothing_and_says_so():
    cfg = dataclasses.replace(ONE_LAYER, moe=BALANCED)
    state = random_state(cfg, jax.sharding.get_mesh())
    counts = {"step": jnp.int32(5), "skipped": jnp.int32(0)}
    state = dataclasses.replace(state, opt_state=jax.tree.map(jnp.abs, state.opt_state), **counts)
    batch = loader_batch(cfg)
    batch |= {"targets": np.full_like(batch["targets"], -1)}
    after, metrics = jax.jit(functools.partial(train_step, cfg))(state, batch)
    for new, old in zip(
        jax.tree.leaves((after.params, after.opt_state)),
        jax.tree.leaves((state.params, state.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(new, old)
    assert (int(after.step), int(after.skipped)) == (6, 1)
    assert bool(metrics["skipped"])
    assert reason(metrics) == "no targets"


def test_metrics_of_two_choices_count_tokens_once_for_the_entropy():
    """And layers that pad a pipeline do not count."""
    experts = dataclasses.replace(BASE.model.experts, top_k=2)
    cfg = dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, experts=experts))
    padded = np.concatenate([ROUTED, 0 * ROUTED[:1]])
    found = jax.jit(functools.partial(balance.metrics, cfg))(padded)
    assert found["moe_entropy"] == pytest.approx(28 / 16)
    assert found["moe_max_load"] == 9 / 4
    np.testing.assert_allclose(np.mean(found["moe_load"]), 1)
