"""Recipes on 4,096 GPUs without one: their steps traced on an abstract mesh, and the shapes that must come out."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from ultrascale_jax.cli.command_line import load_recipe, recipes
from ultrascale_jax.config import Config, Keep, MeshConfig, PipelineConfig
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


def check_step(cfg: Config) -> None:
    """Assert that the step returns the state that it takes, and scalars as metrics."""
    names = ["tokens", "targets", "positions"] + ["segment_ids"] * cfg.data.document_mask
    shape = (cfg.train.global_batch, cfg.data.seq_len)
    mesh = abstract_mesh(cfg.mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        sharding = NamedSharding(mesh, act("BT"))
        batch = {n: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for n in names}
        before = jax.eval_shape(lambda: initial_state(cfg))
        after, metrics = jax.eval_shape(make_train_step(cfg), before, batch)
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
