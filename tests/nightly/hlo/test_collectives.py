"""Larger programs: hybrid sharding on 64 GPUs, long sequences, large and mixed pipelines; and steps for other GPUs."""

import dataclasses
import math

import pytest

from tests.gpu_programs import (
    FAST,
    HOPS,
    compile_once,
    compiled,
    hops_beside_attention,
    layer_loops,
    matrices,
    pick,
    steady_sends,
)
from ultrascale_jax.cli.command_line import load_recipe
from ultrascale_jax.config import GPU_MEMORY_SHARE, Experts, MeshConfig
from ultrascale_jax.configs import llama3_8b_1m, llama3_8b_128k, llama3_405b
from ultrascale_jax.hlo.classes import block_of
from ultrascale_jax.parallel.experts.capacity import DENSE_OR_SHARED
from ultrascale_jax.parallel.pipeline.schedules import of_config
from ultrascale_jax.plan.auto import choose_auto
from ultrascale_jax.plan.compiled.compile import compile_step, simulate_step
from ultrascale_jax.plan.formulas.pipeline import shares
from ultrascale_jax.plan.hardware import find_cluster, find_gpu

FLOAT32 = 4


def test_hybrid_sharding_reduces_only_the_shard_over_replicas():
    cfg, step = compiled(64, {"dp": 8, "fsdp": 8})
    m = cfg.model
    # The loop's first two iterations sum zeros, since no layer's gradient waits yet.
    num_matrix = (m.num_layers + 2) * sum(matrices(cfg).values()) + 2 * m.vocab_size * m.d_model
    forward, backward = layer_loops(step, cfg)
    assert {c.axes for c in forward} == {("fsdp",)}
    summed = pick(step.collectives, "all-reduce", "dp")
    # A layer's are summed beside the products of the next; those of embedding, head and first layer stay outside.
    assert {c.axes for c in backward} == {("fsdp",), ("dp",)}
    assert all(c.asynchronous and c.hidden_by_heavy for c in summed if c in backward)
    over_dp = [(array, math.prod(c.loops)) for c in summed for array in c.operands]
    assert {array.dtype for array, _ in over_dp} == {"f32"}
    assert sum(array.bytes * trips for array, trips in over_dp) == num_matrix // 8 * FLOAT32


def test_memory_depends_on_the_piece_and_not_on_the_sequence():
    """Twice the length over twice the ranks: the activations of a GPU stay, so they fall as 1/cp."""

    def used(seq_len: int, cp: int) -> int:
        mesh = {"fsdp": 8 // cp, "cp": cp}
        return compiled(8, mesh, seq_len=seq_len, global_batch=8 // cp)[1].temporary_bytes

    assert used(32768, 8) == pytest.approx(used(16384, 4), rel=0.1)


@pytest.mark.parametrize(("recipe", "num_gpus"), [(llama3_8b_128k, 8), (llama3_8b_1m, 64)])
def test_recipes_of_long_sequences_fit_and_wait_for_no_keys(recipe, num_gpus):
    cluster = find_cluster(None, "h100", num_gpus)
    step = compile_once(choose_auto(recipe.config, cluster)[0].check(num_gpus), num_gpus)
    assert step.peak_bytes < cluster.gpu.usable_bytes
    if recipe.config.cp.ranks(recipe.config.mesh.cp)[0] > 1:
        assert hops_beside_attention(step) == HOPS
    timeline = simulate_step(step, cluster)
    assert sum(timeline.exposed_s.values()) < 0.05 * timeline.step_s


def test_a_large_model_fits_and_its_steady_state_waits_for_no_send():
    """Llama 3.1 405B on 1,024 GPUs."""
    cfg, mesh, num_devices = llama3_405b.config, MeshConfig(pp=16, fsdp=8, sp=8), 1024
    batch = {"microbatches": 64, "global_batch": mesh.batch * 64}
    train = dataclasses.replace(cfg.train, zero=1, remat="full", **batch)
    cfg = dataclasses.replace(cfg, mesh=mesh, train=train).check(num_devices)
    step = compile_once(cfg, num_devices)
    assert step.peak_bytes <= GPU_MEMORY_SHARE * find_gpu("h100").memory_gib * 2**30
    steady = steady_sends(of_config(cfg), step)
    assert len(steady) == 2
    assert all(c.asynchronous and c.hidden_by for c in steady)


def test_tokens_travel_outside_of_the_conditional_where_layers_of_both_kinds_are_in_a_stage():
    experts = Experts(num=8, top_k=2, d_ff=512, shared=1, dense_layers=1)
    batch = {"microbatches": 4, "global_batch": 16, "zero": 1, "remat": "full"}
    mesh = {"pp": 2, "fsdp": 2, "ep": 2}
    # With room for every token there are no further rounds, which are the same program again in a loop.
    moe = {"capacity_factor": 8.0}
    cfg, step = compiled(8, mesh, experts=experts, moe=moe, **batch)
    computations, module = step.module.computations, step.module
    conditionals = [i for body in computations.values() for i in body if i.opcode == "conditional"]
    conditionals = [i for i in conditionals if block_of(module, i) == "moe"]
    branches = {name for i in conditionals for name in i.called}
    assert branches and not branches & {c.computation for c in step.collectives}
    # In lock step all ranks wait for the experts, which have wider products than the dense layer of another rank.
    assert cfg.model.d_ff <= (experts.top_k + experts.shared) * cfg.model.expert_d_ff
    share = shares(step.run, module)
    expected = [float(DENSE_OR_SHARED not in i.op_name) for i in conditionals]
    assert [share(i, (4,)) for i in conditionals] == expected and set(expected) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("gpu", "gpus_per_host"), [("a100", 2), ("gb200", None), ("b300", 4), ("a40", 4)]
)
def test_a_step_compiles_for_gpus_whose_times_xla_does_not_know(gpu, gpus_per_host):
    step = compile_step(load_recipe("debug"), 4, gpu, gpus_per_host=gpus_per_host, options=FAST)
    assert step.axes["fsdp"] == 4
    assert 0 < step.argument_bytes < step.peak_bytes
