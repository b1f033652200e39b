"""Layers of one's own: what breaks the contract of `docs/layers.md` gets one error, and checkpoints know the class."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import core

import ultrascale_jax as us
from tests.checkpoints import save
from tests.own_layers import CFG, GatedAttention, OwnModel, SquaredReLU, on
from tests.runs import change, mesh_of, saved_state
from tests.states import some_state
from ultrascale_jax.config import (
    Config,
    Lora,
    UserError,
)
from ultrascale_jax.train_step.state import abstract_batch
from ultrascale_jax.train_step.step import train_step


def trace(model: type, mesh: str = "fsdp=2,sp=2", *, cfg: Config = CFG, **train) -> None:
    """Trace a training step, without compiling it."""
    cfg = on(change(cfg, train=train), mesh)
    devices = mesh_of(cfg)
    with jax.set_mesh(devices):
        state, batch = us.abstract_state(cfg, devices, model), abstract_batch(cfg, devices)
        jax.eval_shape(lambda *args: train_step(cfg, *args), state, batch)


def model_with(terms: dict[str, float] | None = None, **parts) -> type:
    class Own(us.Transformer):
        layers = us.Layers(**parts)
        layer_terms = terms or {}

    return Own


class InFloat32(us.MLP):
    def __call__(self, x_BRD):
        return super().__call__(x_BRD).astype(jnp.float32)


class Gathered(us.MLP):
    def __call__(self, x_BRD):
        return us.reshard("BRD->BTD", super().__call__(x_BRD))


class WithTerm(us.MLP):
    terms = staticmethod(lambda x_BRD: {"size": jnp.mean(jnp.abs(x_BRD.astype(jnp.float32)))})

    def __call__(self, x_BRD):
        return super().__call__(x_BRD), self.terms(x_BRD)


class TermOfTokens(WithTerm):
    terms = staticmethod(lambda x_BRD: {"size": jnp.mean(x_BRD.astype(jnp.float32), axis=-1)})


class TermNamedLoss(WithTerm):
    terms = staticmethod(lambda x_BRD: {"loss": jnp.float32(0)})


class AttentionOfTheSameTerm(us.Attention):
    def __call__(self, x_BRD, inputs):
        return *super().__call__(x_BRD, inputs), {"size": jnp.float32(0)}


class WholeSums(GatedAttention):
    def __call__(self, x_BRD, inputs):
        y_BTD, cache, _ = super().__call__(x_BRD, inputs)
        return us.reshard("BTD->BTD", y_BTD, summed=frozenset({"sp", "tp"})), cache


def mlp_of(dims: str, shape: tuple[int, ...], act_dims: str = "BTD") -> type:
    class OfDims(SquaredReLU):
        def __init__(self, cfg, key):
            self.w = us.param(key, dims, act_dims, shape)

    return OfDims


class WithoutInputs(GatedAttention):
    def __call__(self, x_BRD):
        return x_BRD


class NoCall:
    def __init__(self, cfg):
        pass


class SumsAlone(us.Attention):
    def __call__(self, x_BRD, inputs):
        return super().__call__(x_BRD, inputs)[0]


FAULTS = {
    "a name": ({"attention": "ring"}, r"layers\.attention='ring': must be a class"),
    "no cache": ({"attention": SumsAlone}, r"layers\.attention='SumsAlone': must return its"),
    "call": (
        {"attention": WithoutInputs},
        r"layers\.attention='WithoutInputs': .*\(x_BRD, inputs\)",
    ),
    "no call": ({"norm": NoCall}, r"layers\.norm='NoCall': .*must be callable with \(x_BRD\)"),
    "type": ({"mlp": InFloat32}, r"layers\.mlp='InFloat32': returned float32\["),
    "split": ({"mlp": Gathered}, r"layers\.mlp='Gathered': .*must return bfloat16\[8"),
    "term of each token": (
        {"mlp": TermOfTokens},
        r"layers\.mlp='TermOfTokens': .*'size': 'float32\[",
    ),
    "undeclared term": ({"mlp": WithTerm}, r"Own\.layer_terms={}: the parts returned \['size'\]"),
    "missing term": ({"terms": {"x": 0}}, r"Own\.layer_terms={'x': 0}: the parts returned \[\]"),
    "term of both parts": (
        {"mlp": WithTerm, "attention": AttentionOfTheSameTerm},
        r"layers=\['size'\]: attention and MLP return",
    ),
    "name of a metric": (
        {"mlp": TermNamedLoss, "terms": {"loss": 0}},
        r"Own\.layer_terms='loss': is the name of another metric",
    ),
    "whole sums": ({"attention": WholeSums}, r"layers\.attention='WholeSums': .*partial=True"),
    "unknown letter": ({"mlp": mlp_of("Dy", (32, 8))}, r"dims='Dy': y is none of the letters A"),
    "number of sizes": ({"mlp": mlp_of("DF", (32,))}, r"shape=\(32,\): dims='DF' has 2 letters"),
    "size": ({"mlp": mlp_of("DF", (32, 7))}, r"shape=\(32, 7\): F is 7, .*mesh\.sp\*mesh\.tp=2"),
}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [*((name, "fsdp=2,sp=2") for name in FAULTS), ("type", "pp=2,sp=2"), ("split", "pp=2,sp=2")],
)
def test_a_layer_that_breaks_the_contract_is_named(name, mesh):
    parts, message = FAULTS[name]
    with pytest.raises(UserError, match=message):
        trace(model_with(**parts), mesh)


@pytest.mark.parametrize(
    ("mesh", "precision"), [("fsdp=2,sp=2", "fp8_block"), ("pp=2,sp=2", "fp8")]
)
def test_own_layers_take_every_precision(mesh, precision):
    trace(OwnModel, mesh, precision=precision)


def test_a_term_with_the_name_of_a_column_of_the_run_or_of_another_term_is_refused(tmp_path):
    class Twice(us.Transformer):
        loss_terms = ("size",)
        layer_terms: ClassVar = {"size": 0}

    class Column(us.Transformer):
        loss_terms = ("mfu",)

    cfg = on(change(CFG, log={"run_dir": str(tmp_path)}), "fsdp=2")
    for model, message in (
        (Twice, r"Twice\.layer_terms='size': is the name of another"),
        (Column, r"Column\.loss_terms='mfu': is the name of another"),
    ):
        with pytest.raises(UserError, match=message):
            us.train(cfg, mesh_of(cfg), model=model)
    assert not [*tmp_path.iterdir()]


class PlainProducts(SquaredReLU):
    def __call__(self, x_BRD):
        return jnp.square(jax.nn.relu(x_BRD @ self.w_up[...])) @ self.w_down[...]


@pytest.mark.parametrize("mesh", ["fsdp=2,sp=2", "pp=2,sp=2"])
def test_a_product_over_a_split_dim_is_refused_in_a_pipeline_too(mesh):
    """There the region is manual, and JAX would take a device's shard for the whole."""
    with pytest.raises(core.ShardingTypeError, match="dot_general"):
        trace(model_with(mlp=PlainProducts), mesh)


def test_inputs_of_a_split_sequence_need_its_order():
    cfg = on(CFG, "fsdp=2,cp=2")
    positions = jnp.zeros((2, 8), jnp.int32)
    with jax.set_mesh(mesh_of(cfg)):
        with pytest.raises(UserError, match=r"^context=None: cp=2 splits .* give cfg\.cp"):
            us.LayerInputs.of(cfg.model, positions)
        assert us.LayerInputs.of(cfg.model, positions, context=cfg.cp).context == cfg.cp


def test_another_optimizer_than_optax_and_a_layer_for_layers_are_refused():
    class Model(us.Transformer):
        make_optimizer = staticmethod(lambda cfg: "lion")

    with pytest.raises(UserError, match=r"make_optimizer='Model': returned 'lion'; must return an"):
        trace(Model)
    cfg = on(CFG, "fsdp=1")
    with jax.set_mesh(mesh_of(cfg)), pytest.raises(UserError, match=r"^capture: .* as \(2,\)"):
        model = us.Transformer(cfg.model, jax.random.key(0))
        positions = jnp.zeros((1, 8), jnp.int32)
        model(positions, us.LayerInputs.of(cfg.model, positions), capture=1)


def test_a_pipeline_refuses_terms_of_an_mlp_that_only_some_layers_have():
    experts = us.Experts(num=4, top_k=2, d_ff=32, dense_layers=1)
    cfg, model = change(CFG, model={"experts": experts}), model_with({"size": 0}, mlp=WithTerm)
    trace(model, cfg=cfg)
    with pytest.raises(UserError, match=r"layers\.mlp='WithTerm': returns terms, .* without pp"):
        trace(model, "pp=2,fsdp=2", cfg=cfg)


def test_what_cannot_be_with_own_layers_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"train\.lora\.targets=.* has a GatedAttention; train all"):
        trace(OwnModel, lora=Lora(rank=2), init_from="hf:x")
    with pytest.raises(UserError, match=r"model=.*must be Transformer or a subclass"):
        trace(lambda *args: OwnModel(*args))
    cfg = on(CFG, "fsdp=2")
    state = some_state(cfg, mesh_of(cfg), model=OwnModel)
    with pytest.raises(UserError, match=r"model='OwnModel': has layers of its own"):
        us.save_hf(state.params, cfg.model, tmp_path / "hf")


def test_a_checkpoint_of_own_layers_is_loaded_on_another_mesh_with_its_class(tmp_path):
    cfg = on(change(CFG, log={"run_dir": str(tmp_path)}), "pp=2,fsdp=2")
    state = some_state(cfg, mesh_of(cfg), model=OwnModel)
    save(cfg, state, 1)
    mesh = mesh_of(on(CFG, "fsdp=2,tp=2"))
    _, loaded = us.load_run(tmp_path, mesh, model=OwnModel)
    np.testing.assert_array_equal(loaded.w_up[...], state.params.w_up[...])
    up = state.params.stacks[0].mlp.w_up[...]
    np.testing.assert_array_equal(loaded.stacks[0].mlp.w_up[...], up)
    said = r"model='Transformer': .* is of a OwnModel; pass the class"
    for load in (lambda: us.load_run(tmp_path, mesh), lambda: saved_state(cfg, tmp_path, 1)):
        with pytest.raises(UserError, match=said):
            load()
