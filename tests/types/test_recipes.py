"""Every recipe's step has the right shapes, types and shardings on 4,096 GPUs, without one."""

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from ultrascale_jax.cli.command_line import load_recipe, recipes
from ultrascale_jax.config import Config, Keep, Lora, MeshConfig, PipelineConfig
from ultrascale_jax.plan.formulas.memory import state as predicted
from ultrascale_jax.plan.formulas.parameters import weights_of
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.sharding.mesh import abstract_mesh
from ultrascale_jax.sharding.rules import act
from ultrascale_jax.train_step.preference import SUMS
from ultrascale_jax.train_step.state import initial_state
from ultrascale_jax.train_step.step import make_train_step

NUM_DEVICES = 4096
FIXED = {
    "llama32_1b": {"remat": "selective", "microbatches": 8},
    "llama3_8b_128k": {
        "remat": Keep(saved=("q", "k", "v", "attn_core", "attn_out", "gate")),
        "microbatches": 32,
    },
    "llama3_8b_1m": {"remat": "dots", "microbatches": 4},
    "smollm2_135m": {"microbatches": 4},
    "deepseek_v3": {"remat": Keep(saved=("attn_out", "gate")), "microbatches": 60},
}
"""Values of what these recipes leave open; the others recompute all, in one micro-batch."""


def fixed(name: str) -> Config:
    """The recipe with nothing open."""
    cfg = load_recipe(name)
    values = {"remat": "full", "microbatches": 1} | FIXED.get(name, {})
    train = dataclasses.replace(cfg.train, **{field: values[field] for field in cfg.train.auto})
    return dataclasses.replace(cfg, train=train)


RECIPES = {name: fixed(name) for name in recipes()}


def on_4096(cfg: Config) -> Config:
    """The recipe on its own mesh, or, where 4,096 is too many for it, on one with every axis that it can fill.

    A recipe with context parallelism or a pipeline keeps its mesh and gets a larger batch.
    """
    try:
        return cfg.check(NUM_DEVICES)
    except ValueError:
        m, mesh = cfg.model, cfg.mesh
        if mesh.cp == mesh.pp == 1:
            sp = math.gcd(8, m.num_heads, m.num_kv_heads, m.d_ff, m.vocab_size)
            fsdp = math.gcd(m.d_model // mesh.ep, 64)
            mesh = MeshConfig(dp=-1, fsdp=fsdp, ep=mesh.ep, sp=sp)
        mesh = mesh.resolve(NUM_DEVICES)
        microbatches = cfg.train.microbatches
        while mesh.batch * microbatches * cfg.data.seq_len >= 2**31:  # tokens are counted in int32
            microbatches //= 2
        batch = mesh.batch * microbatches
        train = dataclasses.replace(cfg.train, global_batch=batch, microbatches=microbatches)
        return dataclasses.replace(cfg, mesh=mesh, train=train).check(NUM_DEVICES)


def test_all_recipes_are_found():
    assert {"demo", "debug", "llama3_8b", "llama3_8b_1m", "qwen3_32b"} <= set(RECIPES)


PIPELINES = {
    "llama3_8b": ({"pp": 8, "fsdp": 128, "cp": 4}, PipelineConfig(schedule="zb_v"), 16),
    "llama3_70b": ({"pp": 4, "fsdp": 128, "sp": 8}, PipelineConfig(), 16),
    "llama3_405b": (  # 126 layers on 32 stages
        {"pp": 16, "fsdp": 8, "cp": 4, "sp": 8},
        PipelineConfig(schedule="interleaved", virtual=2, stash="input"),
        32,
    ),
    "qwen3_32b": (
        {"pp": 4, "dp": 16, "fsdp": 8, "tp": 8},
        PipelineConfig(schedule="zb_uniform"),
        8,
    ),
    "qwen3_30b_a3b": ({"pp": 4, "fsdp": 16, "ep": 64}, PipelineConfig(schedule="zb_v"), 8),
}
"""Mesh, schedule and micro-batches."""


def in_a_pipeline(name: str) -> Config:
    """The recipe on 4,096 GPUs by pipelines, with one sequence a GPU and micro-batch."""
    sizes, pp, microbatches = PIPELINES[name]
    cfg, mesh = RECIPES[name], MeshConfig(**sizes)
    train = dataclasses.replace(
        cfg.train, microbatches=microbatches, global_batch=mesh.batch * microbatches
    )
    return dataclasses.replace(cfg, mesh=mesh, pp=pp, train=train).check(NUM_DEVICES)


def wide(names, but):
    """The names as parameters; all `but` a few that have everything the others have are `wide`."""
    return [pytest.param(n, marks=() if n in but else pytest.mark.wide) for n in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", wide(sorted(RECIPES), but=("llama3_8b_1m", "llama3_405b")))
def test_the_step_of_each_recipe_returns_the_state_that_it_takes(name):
    assert_the_step_returns_the_state_that_it_takes(on_4096(RECIPES[name]), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", wide(PIPELINES, but=("llama3_405b", "qwen3_30b_a3b")))
def test_the_step_of_a_pipeline_returns_the_state_that_it_takes(name):
    assert_the_step_returns_the_state_that_it_takes(in_a_pipeline(name), name)


@pytest.mark.slow
def test_the_step_of_deepseek_v3_with_its_module_in_fp8_returns_the_state_that_it_takes():
    cfg = RECIPES["deepseek_v3"]
    model = dataclasses.replace(cfg.model, mtp_layers=1)
    batch = {"microbatches": 2, "global_batch": 2048}
    train = dataclasses.replace(cfg.train, zero=3, precision="fp8", **batch)
    mesh = MeshConfig.of(dp=2, fsdp=4, ep=64, cp=2, sp=4)
    cfg = dataclasses.replace(cfg, model=model, train=train, mesh=mesh).check(NUM_DEVICES)
    assert_the_step_returns_the_state_that_it_takes(cfg, "deepseek_v3 with its module in fp8")


# Its layers in fp8 are in the step above, experts in a pipeline in that of qwen3_30b_a3b.
@pytest.mark.wide
def test_the_step_of_deepseek_v3_in_fp8_returns_the_state_that_it_takes():
    cfg = on_4096(RECIPES["deepseek_v3"])
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, precision="fp8"))
    assert_the_step_returns_the_state_that_it_takes(cfg, "deepseek_v3 in fp8")


def assert_the_step_returns_the_state_that_it_takes(cfg: Config, name: str):
    names = ["tokens", "targets", "positions"] + ["segment_ids"] * cfg.data.document_mask
    shape = (cfg.train.global_batch, cfg.data.seq_len)
    mesh = abstract_mesh(cfg.mesh)
    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh):
        sharding = NamedSharding(mesh, act("BT"))
        batch = {n: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for n in names}
        before = jax.eval_shape(lambda: initial_state(cfg))
        after, metrics = jax.eval_shape(make_train_step(cfg), before, batch)
    print(f"{name}: {dict(cfg.mesh.sizes)} in {time.perf_counter() - start:.2f} s")
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert [describe(leaf) for leaf in jax.tree.leaves(before)] == [
        describe(leaf) for leaf in jax.tree.leaves(after)
    ]
    assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {jnp.dtype("float32")}
    expected = {
        "loss": ((), "float32"),
        "grad_norm": ((), "float32"),
        "lr": ((), "float32"),
        "tokens": ((), "int32"),
        "skipped": ((), "bool"),
    }
    if cfg.model.experts is not None:
        names = ("moe_max_load", "moe_entropy")
        expected |= dict.fromkeys(names, ((), "float32"))
        expected["moe_load"] = ((cfg.model.experts.num,), "float32")
    if cfg.model.mtp_layers:
        expected["mtp_loss"] = ((cfg.model.mtp_layers,), "float32")
    if cfg.train.dpo.enabled:
        expected |= {name: ((), "float32") for name in (*SUMS, "reward_margin")}
        expected["pairs"] = ((), "int32")
    assert {n: (m.shape, m.dtype.name) for n, m in metrics.items()} == expected


def describe(leaf: jax.ShapeDtypeStruct) -> tuple:
    """Shape, type and mesh axes; no sharding is whole on every device."""
    spec = () if leaf.sharding is None else tuple(leaf.sharding.spec)
    while spec and spec[-1] is None:
        spec = spec[:-1]
    return leaf.shape, leaf.dtype.name, spec


def on_1024(name: str, **train) -> Config:
    """The recipe on 1,024 GPUs, of which 512 shard the parameters, with one sequence a GPU."""
    mesh = MeshConfig(dp=2, fsdp=8, ep=64)
    batch = {"microbatches": 1, "global_batch": mesh.batch, "remat": "full", **train}
    cfg = RECIPES[name]
    return dataclasses.replace(cfg, mesh=mesh, train=dataclasses.replace(cfg.train, **batch)).check(
        1024
    )


def local_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
    return math.prod(shape) * leaf.dtype.itemsize


@pytest.mark.parametrize(
    "cfg",
    [
        on_4096(RECIPES["llama3_70b"]),
        on_4096(RECIPES["llama3_405b"]),
        in_a_pipeline("llama3_70b"),
        in_a_pipeline("llama3_405b"),
        on_4096(RECIPES["mixtral_8x7b"]),
        on_4096(RECIPES["deepseek_v3"]),
        on_1024("deepseek_v3"),
    ],
    ids=["70b", "405b", "70b_pp", "405b_pp", "mixtral", "deepseek_pp", "deepseek"],
)
def test_large_models_split_every_matrix_over_all_devices_that_do_not_replicate(cfg):
    with jax.sharding.use_abstract_mesh(abstract_mesh(cfg.mesh)):
        state = jax.eval_shape(lambda: initial_state(cfg))
    parts = cfg.mesh.pp * cfg.mesh.fsdp * cfg.mesh.ep * cfg.mesh.cp * cfg.mesh.tensor
    for leaf in jax.tree.leaves(state.params):
        if math.prod(leaf.shape) > 2**24:
            local = leaf.sharding.shard_shape(leaf.shape)
            assert math.prod(local) * parts == math.prod(leaf.shape)
    run = Run.of(cfg, math.prod(cfg.mesh.sizes.values()))
    found = sum(map(local_bytes, jax.tree.leaves(state.params)))
    assert predicted(run, weights_of(run))["master parameters"] == pytest.approx(found, rel=1e-5)


@pytest.mark.parametrize("rank", [16, 512])
def test_an_adapters_rank_rests_whole_where_its_shards_do_not_divide_it_and_the_plan_knows(rank):
    cfg = on_1024("llama3_8b", lora=Lora(rank=rank), init_from="hf:folder")
    with jax.sharding.use_abstract_mesh(abstract_mesh(cfg.mesh)):
        state = jax.eval_shape(lambda: initial_state(cfg))
    run = Run.of(cfg, 1024)
    weights = weights_of(run)
    found = 4 * weights.vectors + sum(map(local_bytes, jax.tree.leaves(state.params)))
    assert predicted(run, weights)["master parameters"] == pytest.approx(found, rel=1e-5)
