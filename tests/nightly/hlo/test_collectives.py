"""The communication of larger programs: hybrid sharding on 64 GPUs, long sequences, a large pipeline."""

import dataclasses
import math

import pytest

from tests.gpu_programs import (
    HOPS,
    compile_once,
    compiled,
    hops_beside_attention,
    layer_loops,
    matrices,
    pick,
    steady_sends,
)
from ultrascale_jax.config import GPU_MEMORY_SHARE, MeshConfig
from ultrascale_jax.configs import llama3_8b_1m, llama3_8b_128k, llama3_405b
from ultrascale_jax.parallel.pipeline.schedules import of_config
from ultrascale_jax.plan.auto import choose_auto
from ultrascale_jax.plan.compiled.compile import simulate_step
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
