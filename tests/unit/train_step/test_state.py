"""The state at rest: the same numbers on any mesh, layers where the schedule wants them, padding that stays zero."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.faults.tiny import MODEL
from tests.runs import mesh_of
from tests.states import some_state
from ultrascale_jax.checkpoint.mesh_independent import gather_stages, to_checkpoint_layout
from ultrascale_jax.config import (
    Config,
    Experts,
    MeshConfig,
    OptimConfig,
    PipelineConfig,
)
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.parallel.pipeline.schedules import order_of_config
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.train_step.optim import optimizer
from ultrascale_jax.train_step.state import init_state

LAYERS = 5


class AttentionAlone(Transformer):
    """Nothing else is trained."""

    @staticmethod
    def is_trained(path):
        return ".attn." in path


BASE = Config(
    model=dataclasses.replace(MODEL, num_layers=LAYERS, qkv_bias=True), mesh=MeshConfig(fsdp=1)
)
PIPELINES = {
    "pp2_1f1b": ({"pp": 2, "fsdp": 2, "sp": 2}, PipelineConfig()),
    "pp4_1f1b": ({"pp": 4, "fsdp": 2}, PipelineConfig()),
    "pp2_interleaved": ({"pp": 2, "tp": 2}, PipelineConfig(schedule="interleaved")),
    "pp2_zb_v": ({"pp": 2}, PipelineConfig(schedule="zb_v")),
}
ORDERS = {
    "pp2_1f1b": (0, 1, 2, 3, 4, None),
    "pp4_1f1b": (0, 1, 2, None, 3, None, 4, None),
    "pp2_interleaved": (0, 1, 3, None, 2, None, 4, None),
    "pp2_zb_v": (0, 1, 4, None, 2, None, 3, None),
}


def on(name: str, cfg: Config = BASE) -> Config:
    sizes, pp = PIPELINES[name]
    mesh = MeshConfig.of(**sizes)
    train = dataclasses.replace(cfg.train, microbatches=4)
    return dataclasses.replace(cfg, mesh=mesh, pp=pp, train=train)


def test_gathered_stages_are_the_model_as_a_whole():
    experts = Experts(num=4, top_k=2, d_ff=32, dense_layers=1)
    base = dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, experts=experts))
    tokens = np.random.default_rng(0).integers(0, 64, (8, 16)).astype(np.int32)
    positions = np.tile(np.arange(16, dtype=np.int32), (8, 1))

    def states(cfg: Config) -> np.ndarray:
        mesh = mesh_of(cfg)
        with jax.set_mesh(mesh):
            model = gather_stages(some_state(cfg, mesh, scale=0.2).params)
            place = NamedSharding(mesh, act("BT"))
            rows = [jax.device_put(a, place) for a in (tokens, positions)]

            @jax.jit
            def run(model, tokens, positions):
                inputs = LayerInputs.of(cfg.model, positions, context=cfg.cp)
                out = model(tokens, inputs, capture=(1,))
                return out.captured[1], out.x_BRD

            return np.asarray(run(model, *rows))

    expected = captured, normed = states(base)
    np.testing.assert_allclose(np.square(normed).mean(-1), 1, rtol=1e-3)
    assert np.abs(np.square(captured).mean(-1) - 1).max() > 0.1  # before the final norm
    error = np.abs(states(on("pp2_interleaved", base)) - expected).max()
    assert error < 1e-5 * np.abs(expected).max()


def test_the_layers_of_every_schedule_have_their_order():
    assert {name: order_of_config(on(name)) for name in PIPELINES} == ORDERS


MIXED = dataclasses.replace(
    BASE,
    model=dataclasses.replace(
        BASE.model,
        vocab_size=65,
        experts=Experts(num=4, top_k=2, d_ff=16, dense_layers=2, bias=True),
    ),
)
"""Two layers with one feed-forward layer, three with experts, and a vocabulary that two ranks pad."""


def test_a_pipeline_starts_from_the_numbers_of_one_device_and_pads_with_zeros():
    """Dense layers have as few rows as the fullest rank, and experts one at each position."""
    dense, experts = (0, 1), (None, None, 4, None, None, 2, 3, None)
    cfg = on("pp2_zb_v", MIXED)
    alone = init_state(MIXED, mesh_of(MIXED)).params
    params = init_state(cfg, mesh_of(cfg)).params
    assert params.orders == (dense, experts)
    assert all(leaf.sharding.spec[0] == "pp" for leaf in jax.tree.leaves(params.stacks))
    for axis, name in enumerate(("embed", "head")):
        words, padding = np.split(np.asarray(getattr(params, name)[...]), [65], axis)
        np.testing.assert_array_equal(words, getattr(alone, name)[...])
        assert padding.shape[axis] == 2 * 128 - 65 and not padding.any()
    for order, stack, first, expected_stack in zip(
        params.orders, params.stacks, (0, 2), alone.stacks, strict=True
    ):
        pairs = zip(jax.tree.leaves(stack), jax.tree.leaves(expected_stack), strict=True)
        for here, expected in pairs:
            for row, layer in zip(np.asarray(here), order, strict=True):
                np.testing.assert_array_equal(row, 0 if layer is None else expected[layer - first])


def trained(cfg):
    """Parameters and optimizer state after two updates with the parameters' own values as gradients."""

    def update(state, _):
        params, opt_state = state
        updates, opt_state = optimizer(cfg).update(params, opt_state, params)
        return (jax.tree.map(jnp.add, params, updates), opt_state), None

    state = some_state(cfg, mesh_of(cfg))
    start = (state.params, state.opt_state)
    with jax.set_mesh(mesh_of(cfg)):
        return jax.jit(lambda start: jax.lax.scan(update, start, length=2)[0])(start)


def test_muon_updates_layers_of_both_kinds_in_a_pipeline_as_on_one_device():
    train = dataclasses.replace(MIXED.train, precision="fp32")
    alone = dataclasses.replace(MIXED, train=train, optim=OptimConfig(name="muon", lr=0.1))
    here = trained(on("pp2_1f1b", alone))
    for stack, order in zip(here[0].stacks, here[0].orders, strict=True):
        padding = np.array([layer is None for layer in order])
        assert padding.any() and not any(
            np.asarray(x)[padding].any() for x in jax.tree.leaves(stack)
        )
    moved, expected = to_checkpoint_layout(here), trained(alone)
    for leaf, wanted in zip(jax.tree.leaves(moved), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optim", "model"),
    [("adamw", Transformer), ("muon", Transformer), ("muon", AttentionAlone)],
)
def test_layers_move_and_a_vocabulary_does_not_however_their_shardings_are_written(optim, model):
    cfg = on("pp2_zb_v", dataclasses.replace(BASE, optim=OptimConfig(name=optim)))
    mesh, order = mesh_of(cfg), ORDERS["pp2_zb_v"]
    state = some_state(cfg, mesh, model=model)
    again = {"pp": ("pp", "dp"), ("pp", "sp", "tp"): "pp"}  # of axes of one device but for pp

    def respelled(x):
        return jax.device_put(
            x, NamedSharding(mesh, P(*(again.get(s, s) for s in x.sharding.spec)))
        )

    state = jax.tree.map(respelled, state)
    state = dataclasses.replace(state, opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))
    moved = to_checkpoint_layout(state)
    np.testing.assert_array_equal(moved.params.embed[...], state.params.embed[...])
    rows = [order.index(layer) for layer in range(LAYERS)]
    for after, before in zip(jax.tree.leaves(moved), jax.tree.leaves(state), strict=True):
        stacked = before.ndim > 0 and len(before) == len(order)
        np.testing.assert_array_equal(after, np.asarray(before)[rows] if stacked else before)
