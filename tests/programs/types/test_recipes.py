"""States of recipes have the right shapes and shardings on 4,096 GPUs, without one; by night their steps too."""

import dataclasses
import math

import jax
import pytest

from tests.recipe_steps import RECIPES, check_step, in_a_pipeline, on_4096
from ultrascale_jax.config import Config, Lora, MeshConfig
from ultrascale_jax.plan.formulas.memory import state as predicted
from ultrascale_jax.plan.formulas.parameters import weights_of
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.sharding.mesh import abstract_mesh
from ultrascale_jax.train_step.state import initial_state


def test_the_step_with_folded_experts_returns_the_state_that_it_takes():
    """Two experts are whole on each of 64 ranks of ep and sp, but for ZeRO's 32 shards of D."""
    cfg = RECIPES["qwen3_30b_a3b"]
    mesh = MeshConfig(dp=2, fsdp=32, ep=8, sp=8)
    moe = dataclasses.replace(cfg.moe, folding=True)
    train = dataclasses.replace(cfg.train, global_batch=mesh.batch)
    cfg = dataclasses.replace(cfg, mesh=mesh, moe=moe, train=train).check(4096)
    check_step(cfg)
    with jax.sharding.use_abstract_mesh(abstract_mesh(cfg.mesh)):
        state = jax.eval_shape(lambda: initial_state(cfg))
    [stack] = state.params.stacks
    assert stack.moe.w_up.get_value().sharding.shard_shape(stack.moe.w_up.shape) == (48, 2, 64, 768)


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
