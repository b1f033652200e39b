"""Adapters: their gradients, what a step keeps and changes, and the weights that they are merged into."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from tests.runs import change
from tests.states import bytes_at_rest, some_state
from ultrascale_jax.config import (
    Config,
    DataConfig,
    Experts,
    MeshConfig,
    ModelConfig,
    TrainConfig,
    UserError,
)
from ultrascale_jax.config.lora import TARGETS, Lora
from ultrascale_jax.models.lora import WEIGHTS, merged
from ultrascale_jax.plan.formulas import memory
from ultrascale_jax.plan.formulas.parameters import weights_of
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
        global_batch=8, precision="fp32", lora=Lora(rank=4, rslora=True), init_from="hf:x"
    ),
)


def test_an_adapters_scale_and_what_its_fields_refuse():
    assert Lora(rank=8).scale == Lora(rank=8, alpha=16.0).scale == 2.0
    lora = Lora(rank=16, alpha=8.0, rslora=True, targets=("v_proj", "q_proj"))
    assert (lora.scale, lora.targets) == (2.0, ("q_proj", "v_proj"))
    assert Lora(rank=16, alpha=8.0).scale == 0.5
    assert not Lora().enabled and lora.enabled
    for wrong, named in (
        ({"rank": -1}, r"rank=-1: must be from 0 to 100000"),
        ({"rank": 8, "alpha": -1.0}, r"alpha=-1\.0: must not be negative"),
        ({"rank": 8, "targets": ("qproj",)}, r"targets=\('qproj',\): .* one of q_proj"),
        ({"rank": 8, "targets": ()}, r"targets=\(\): name some of q_proj"),
        ({"alpha": 16.0}, r"alpha=16\.0: has no effect without train\.lora\.rank; give both"),
    ):
        with pytest.raises(UserError, match=rf"^train\.lora\.{named}"):
            Lora(**wrong)


def test_what_adapters_cannot_be_with_is_refused():
    experts = {"model": {"experts": Experts(num=4, top_k=2, d_ff=16)}}
    with pytest.raises(UserError, match=r"train\.lora\.rank=4: .* dense models"):
        change(CFG, **experts).check(4)
    pipeline = change(CFG, train={"microbatches": 2})
    with pytest.raises(UserError, match=r"train\.lora\.rank=4: .* not for pipelines"):
        dataclasses.replace(pipeline, mesh=MeshConfig.of(pp=2)).check(2)


def gradients(cfg, mesh, state, batch):
    """Gradients by name of the parameters that are trained."""
    with jax.set_mesh(mesh):
        batch = jax.device_put(batch, jax.NamedSharding(mesh, act("BT")))
        run = jax.jit(functools.partial(step.gradients, cfg))
        weight = np.float32(1 / batch["targets"].size)
        found = run(state.params, batch, weight, state.frozen)[0]
    leaves = jax.tree.leaves_with_path(found)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    return {
        name.removesuffix(".value"): np.asarray(leaf)
        for name, (_, leaf) in zip(names, leaves, strict=True)
    }


def test_gradients_on_fsdp_x_tp_are_the_dense_model_s_projected_on_one_device():
    cfg = CFG.check(4)
    mesh, alone = (
        make_mesh(cfg.mesh, jax.devices()[:4]),
        make_mesh(MeshConfig(fsdp=1), jax.devices()[:1]),
    )
    state, batch = some_state(cfg, mesh), make_loader(cfg).batch(0)
    found = gradients(cfg, mesh, state, batch)
    dense = dataclasses.replace(change(cfg, train={"lora": Lora()}), mesh=MeshConfig(fsdp=1))
    with jax.set_mesh(mesh):
        whole = merged(state.params, state.frozen)
    places = jax.tree.map(lambda s: s.sharding, abstract_state(dense, alone).params)
    whole = dataclasses.replace(state, params=jax.device_put(whole, places), frozen=None)
    expected = gradients(dense, alone, whole, batch)
    scale = cfg.train.lora.scale
    assert len(found) == 2 * len(TARGETS)
    for part, name in WEIGHTS.values():
        adapter = getattr(getattr(state.params.stacks[0], part).lora, name)
        a, b = (np.asarray(p.get_value()) for p in (adapter.a, adapter.b))
        rows, columns = math.prod(a.shape[1:-1]), math.prod(b.shape[2:])
        dw = expected[f"stacks.0.{part}.{name}"].reshape(-1, rows, columns)
        da = scale * np.einsum("lrc,luc->lru", dw, b.reshape(len(b), -1, columns))
        db = scale * np.einsum("lru,lrc->luc", a.reshape(len(a), rows, -1), dw)
        for letter, gradient in (("a", da), ("b", db)):
            own = found[f"stacks.0.{part}.lora.{name}.{letter}"].reshape(gradient.shape)
            error = np.abs(own - gradient).max() / np.abs(gradient).max()
            assert error < 1e-5, f"{name}.{letter}: relative error {error:.1e}"


def test_the_base_is_frozen_in_the_type_of_compute_without_moments():
    cfg = change(CFG, train={"precision": "bf16"}).check(4)
    mesh = make_mesh(cfg.mesh, jax.devices()[:4])
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
    assert kinds == {"bfloat16"}
    embed = state.frozen.embed.get_value()
    assert embed.sharding.shard_shape(embed.shape) == (32, 16)  # over tp and fsdp, as ZeRO-3 has it
    run = Run.of(cfg, 4)
    planned = sum(n for part, n in memory.state(run, weights_of(run)).items() if part != "batch")
    assert planned == pytest.approx(bytes_at_rest(state), rel=0.05)
