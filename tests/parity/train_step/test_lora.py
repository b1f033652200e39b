"""Adapters: their gradients, what a step keeps and changes, and the weights that they are merged into."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from tests.runs import change, mesh_of
from tests.states import bytes_at_rest, some_state
from ultrascale_jax.checkpoint.mesh_independent import gather_stages
from ultrascale_jax.config import (
    Config,
    DataConfig,
    Experts,
    LatentAttention,
    LinearAttention,
    MeshConfig,
    ModelConfig,
    Multipliers,
    TrainConfig,
)
from ultrascale_jax.config.lora import Lora, projections
from ultrascale_jax.models.frozen_fp8 import quantised
from ultrascale_jax.models.lora import merged, places
from ultrascale_jax.models.partition import split_adapters
from ultrascale_jax.plan.formulas import memory
from ultrascale_jax.plan.formulas.parameters import trained_params, weights_of
from ultrascale_jax.plan.model_shape import adapter_params
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.train_step import step
from ultrascale_jax.train_step.state import abstract_state
from ultrascale_jax.train_step.step import train_step
from ultrascale_jax.training.setup import make_loader

CFG = Config(
    model=ModelConfig(
        vocab_size=64, d_model=32, d_ff=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
    ),
    mesh=MeshConfig.of(fsdp=2, tp=2),
    data=DataConfig(source="synthetic", seq_len=16),
    train=TrainConfig(
        global_batch=8,
        precision="fp32",
        lora=Lora(rank=4, rslora=True),
        init_from="hf:x",
        lowering="plain",  # rows of parity have the other
    ),
)


def test_an_adapters_scale_is_alpha_over_the_rank_or_its_root():
    assert Lora(rank=8).scale == Lora(rank=8, alpha=16.0).scale == 2.0
    lora = Lora(rank=16, alpha=8.0, rslora=True, targets=("v_proj", "q_proj"))
    assert (lora.scale, lora.targets) == (2.0, ("q_proj", "v_proj"))
    assert Lora(rank=16, alpha=8.0).scale == 0.5


def gradients(cfg, mesh, state, batch):
    """Gradients by name of the parameters that are trained."""
    with jax.set_mesh(mesh):
        batch = jax.device_put(batch, jax.NamedSharding(mesh, act("BT")))
        run = jax.jit(functools.partial(step.gradients, cfg))
        weight = np.float32(1 / batch["targets"].size)
        found = gather_stages(run(state.params, batch, weight, state.frozen)[0])
    leaves = jax.tree.leaves_with_path(found)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    return {
        name.removesuffix(".value"): np.asarray(leaf)
        for name, (_, leaf) in zip(names, leaves, strict=True)
    }


EXPERTS = Experts(num=4, top_k=2, d_ff=16, shared=1, dense_layers=1)
LATENT = LatentAttention(q_rank=16, kv_rank=16, rope_dim=4, v_dim=8)
DEEPSEEK = {
    **{"num_layers": 3, "num_kv_heads": 4, "head_dim": 12},
    **{"latent": LATENT, "experts": EXPERTS},
}
LINEAR = {
    "num_layers": 2,
    "full_attention_every": 2,
    "linear": LinearAttention(key_heads=2, value_heads=4, key_dim=4, value_dim=6),
    "output_gate": True,
    "multipliers": Multipliers(attn_o=2.0, mlp_gate=0.5, linear_q=0.7, linear_o=3.0),
}
MODELS = {
    "linear": LINEAR,
    "linear_groups": LINEAR | {"num_layers": 4},
    "llama": {"num_layers": 3},
    "routed": DEEPSEEK,
    "experts": DEEPSEEK
    | {"num_layers": 1, "experts": dataclasses.replace(EXPERTS, dense_layers=0)},
    "ahead": DEEPSEEK
    | {"mtp_layers": 1, "experts": None, "latent": dataclasses.replace(LATENT, q_rank=0)},
}


def config(model, axes, schedule=None):
    cfg = change(CFG, model=MODELS[model])
    if cfg.model.experts is not None:
        lora = dataclasses.replace(cfg.train.lora, targets=projections(cfg.model))
        cfg = change(cfg, train={"lora": lora})
    if schedule:
        cfg = change(cfg, pp={"schedule": schedule}, train={"microbatches": 4})
    return dataclasses.replace(cfg, mesh=MeshConfig.of(**axes)).check(math.prod(axes.values()))


@pytest.mark.parametrize(
    ("model", "axes"),
    [("linear", {"fsdp": 1}), ("experts", {"fsdp": 1})],
)
def test_gradients_are_the_dense_model_s_projected_on_one_device(model, axes):
    """Rows of parity train adapters on every axis and schedule."""
    cfg = config(model, axes)
    mesh, alone = mesh_of(cfg), make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    state = some_state(cfg, mesh)
    found = gradients(cfg, mesh, state, make_loader(cfg).batch(0))
    dense = dataclasses.replace(change(cfg, train={"lora": Lora()}), mesh=MeshConfig(fsdp=1))
    with jax.set_mesh(mesh):
        whole = gather_stages(merged(state.params, state.frozen))
        adapters = gather_stages(state.params)
    abstract = abstract_state(dense, alone).params
    whole = jax.device_put(whole, jax.tree.map(lambda s: s.sharding, abstract))
    whole = dataclasses.replace(state, params=whole, frozen=None)
    expected = gradients(dense, alone, whole, make_loader(dense).batch(0))
    used = [place for place in places(adapters) if place.adapter is not None]
    assert {place.target for place in used} == set(cfg.train.lora.targets_of(cfg.model))
    assert len(found) == 2 * len(used)
    for place in used:
        *outer, name = place.path.split(".")
        for letter, gradient in zip("ab", projected(place, expected[place.path]), strict=True):
            own = found[".".join([*outer, "lora", name, letter])].reshape(gradient.shape)
            error = np.abs(own - gradient).max() / np.abs(gradient).max()
            assert error < 1e-5, f"{place.path}.{letter}: relative error {error:.1e}"


def projected(place, dw):
    """Gradients of A and B by that of the weight, all as matrices, one for each layer (and expert)."""
    adapter, scale = place.adapter, place.adapter.scale
    a, b = (np.asarray(p.get_value()) for p in (adapter.a, adapter.b))
    rank = a.shape[-1]
    lead = a.ndim - len(adapter.a.dims) + adapter.a.dims.count("E")
    a = a.reshape(-1, math.prod(a.shape[lead:-1]), rank)
    b = b.reshape(len(a), rank, -1)
    dw = dw.reshape(len(a), a.shape[1], b.shape[2])
    return scale * dw @ b.swapaxes(1, 2), scale * a.swapaxes(1, 2) @ dw


@pytest.mark.parametrize(
    ("precision", "kind"),
    [("bf16", "bfloat16"), ("fp8", "float8_e4m3fn"), ("fp8_rowwise", "bfloat16")],
)
def test_the_base_is_frozen_in_the_type_of_compute_or_of_its_products_without_moments(
    precision, kind
):
    cfg = change(CFG, train={"precision": precision}).check(4)
    mesh = mesh_of(cfg)
    with jax.set_mesh(mesh):
        state = abstract_state(cfg, mesh)
        split = jax.NamedSharding(mesh, act("BT"))
        batch = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split)
            for name, x in make_loader(cfg).batch(0).items()
        }
        new, _ = jax.eval_shape(functools.partial(train_step, cfg), state, batch)
    form = [(s.shape, s.dtype) for s in jax.tree.leaves(state)]
    assert form == [(s.shape, s.dtype) for s in jax.tree.leaves(new)]
    trained = sum(s.size for s in jax.tree.leaves(state.params))
    assert trained == adapter_params(cfg.model, cfg.train.lora)
    moments = sum(s.size for s in jax.tree.leaves(state.opt_state) if s.ndim)
    assert moments == 2 * trained
    kinds = {s.dtype.name for s in jax.tree.leaves(state.frozen) if s.ndim > 2}
    assert kinds == {kind}
    embed = state.frozen.embed.get_value()
    assert embed.sharding.shard_shape(embed.shape) == (32, 16)  # over tp and fsdp, as ZeRO-3 has it
    run = Run.of(cfg, 4)
    planned = sum(n for part, n in memory.state(run, weights_of(run)).items() if part != "batch")
    assert planned == pytest.approx(bytes_at_rest(state), rel=0.05)


def test_a_base_that_rests_in_fp8_gives_the_bits_of_one_that_each_step_quantises():
    """The step reads what rests, whatever the configuration says of it; rows of fp8 have it in pipelines, by night."""
    cfg = config("llama", {"fsdp": 2, "tp": 2})
    cfg = change(cfg, model={"num_layers": 1}, train={"precision": "bf16", "lowering": "auto"})
    mesh, batch = mesh_of(cfg), make_loader(cfg).batch(0)
    state = some_state(cfg, mesh)
    cfg = change(cfg, train={"precision": "fp8"})
    assert cfg.frozen_in_fp8
    expected = gradients(cfg, mesh, state, batch)
    with jax.set_mesh(mesh):
        params, frozen = split_adapters(quantised(state.model))
    assert "float8_e4m3fn" in {s.dtype.name for s in jax.tree.leaves(frozen)}
    found = gradients(cfg, mesh, dataclasses.replace(state, params=params, frozen=frozen), batch)
    for name, gradient in expected.items():
        np.testing.assert_array_equal(found[name], gradient, err_msg=name)


@pytest.mark.parametrize(
    ("model", "axes", "schedule"),
    [
        ("ahead", {"fsdp": 2, "tp": 2}, None),
        ("routed", {"ep": 2, "tp": 2}, None),
        ("llama", {"pp": 2, "fsdp": 2}, "interleaved"),
        ("routed", {"pp": 2, "ep": 2}, "1f1b"),
        ("linear_groups", {"pp": 2, "tp": 2}, "1f1b"),
    ],
)
def test_the_planner_counts_the_adapters_of_each_model(model, axes, schedule):
    cfg = config(model, axes, schedule)
    state = abstract_state(cfg, mesh_of(cfg))
    layers = sum(layer is not None for order in state.params.orders for layer in order)
    if layers == sum(map(len, state.params.orders)):  # no rows of padding
        trained = sum(s.size for s in jax.tree.leaves(state.params))
        assert trained == adapter_params(cfg.model, cfg.train.lora)
    run = Run.of(cfg, 4)
    kept = sum(np.prod(s.sharding.shard_shape(s.shape)) for s in jax.tree.leaves(state.params))
    assert trained_params(run, weights_of(run)) == kept
