"""Checkpoints, the host's memory, and the bill of a training, by hand and beside the trainer's own state."""

import dataclasses
import math

import jax
import pytest

from tests.states import bytes_at_rest, some_state
from ultrascale_jax.cli.command_line import load_recipe
from ultrascale_jax.config import MeshConfig, with_changes
from ultrascale_jax.config.lora import Lora
from ultrascale_jax.plan.bill import FailureTerms, Terms, bill
from ultrascale_jax.plan.failures import Failures
from ultrascale_jax.plan.formulas.checkpoint import checkpoint
from ultrascale_jax.plan.formulas.host import HostMemory
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.sharding.mesh import make_mesh

SMALLER = {"moment_dtype": "bfloat16", "stochastic_rounding": True}


def run_of(mesh: str, num_gpus: int, **optim):
    cfg = load_recipe("llama3_8b")
    cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, **optim))
    changes = {"remat": "full", "microbatches": 64, "global_batch": 512}
    return Run.of(with_changes(cfg, mesh=MeshConfig.parse(mesh), **changes), num_gpus)


@pytest.mark.parametrize(("optim", "width"), [({}, 12), (SMALLER, 8)])
def test_a_checkpoint_holds_parameters_and_moments_once(optim, width):
    parameters = 8_030_261_248
    for mesh, num_gpus, shards in (("fsdp=8", 8, 8), ("dp=2,fsdp=4", 8, 4)):
        run, cluster = run_of(mesh, num_gpus, **optim), find_cluster(None, "h100", num_gpus)
        found = checkpoint(run, cluster.gpu, storage_gbs=2)
        assert found.total_bytes == width * parameters
        # 65 norms of 4,096 numbers rest whole on every GPU.
        share = width * ((parameters - 65 * 4096) / shards + 65 * 4096)
        assert found.gpu_bytes == int(share)
        assert found.copy_s == pytest.approx(share / (0.85 * 63e9))
        assert found.write_s == pytest.approx(width * parameters / 2e9)
    assert checkpoint(run, cluster.gpu).write_s is None


@pytest.mark.parametrize("lora", [Lora(), Lora(rank=4)])
@pytest.mark.parametrize("optim", [{}, SMALLER])
def test_it_is_the_state_of_the_trainer_but_for_counters(lora, optim):
    cfg = load_recipe("debug")
    cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, **optim))
    cfg = with_changes(cfg, mesh=MeshConfig(), lora=lora)
    state = some_state(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    saved = bytes_at_rest(dataclasses.replace(state, frozen=None))
    found = checkpoint(Run.of(cfg, 1), find_cluster(None, "h100", 1).gpu)
    assert found.total_bytes == found.gpu_bytes
    assert 0 <= saved - found.total_bytes < 100


def test_a_host_holds_what_its_gpus_offload_and_no_more_than_one_checkpoint():
    cfg = load_recipe("llama3_70b")
    offloading = load_recipe("llama3_70b").train.remat
    assert offloading == "auto"
    for mesh, num_gpus in (("fsdp=8", 8), ("fsdp=4", 4), ("fsdp=64", 64)):
        cluster = find_cluster(None, "h100", num_gpus)
        changes = {"remat": "full", "microbatches": 1, "global_batch": 64}
        run = Run.of(with_changes(cfg, mesh=MeshConfig.parse(mesh), **changes), num_gpus)
        step = dataclasses.replace(estimate(run, cluster), host_bytes=3 * 2**30)
        saved = checkpoint(run, cluster.gpu)
        host = HostMemory.of(step, saved, cluster)
        assert host.gpus == min(8, num_gpus)
        assert host.activation_bytes == host.gpus * 3 * 2**30
        assert host.checkpoint_bytes == min(host.gpus * saved.gpu_bytes, saved.total_bytes)
        assert host.total_bytes == host.activation_bytes + host.checkpoint_bytes
        assert host.memory_bytes == 2048 * 2**30


def test_a_bill_follows_from_step_price_and_failures():
    cluster = find_cluster(None, "h100", 8)
    step = estimate(run_of("fsdp=8", 8), cluster)
    terms = Terms(tokens=10**12, price=2.0, storage_gbs=4.0)
    plain = bill(step, terms)
    assert plain.days == pytest.approx(1e12 / (512 * 8192) * step.step_s / 86400)
    assert plain.gpu_hours == pytest.approx(plain.days * 24 * 8)
    assert plain.usd == pytest.approx(2 * plain.gpu_hours)
    assert plain.usd_per_million_tokens == pytest.approx(plain.usd / 1e6)
    assert plain.mwh == pytest.approx(plain.gpu_hours * 1275 / 1e6)
    assert plain.interruptions is None
    failing = FailureTerms(gpu_hours=500, restart_s=900)
    dear = bill(step, dataclasses.replace(terms, failures=failing))
    found = dear.interruptions
    assert found is not None and found.between_s == 3600 * 500 / 8
    saved = checkpoint(step.run, cluster.gpu, 4.0)
    assert found.save_s == saved.copy_s
    costs = Failures(
        mean_s=found.between_s, restart_s=900, save_s=saved.copy_s, write_s=saved.write_s or 0
    )
    every = {steps: costs.goodput(steps * step.step_s) for steps in range(1, 500)}
    assert found.best_interval_steps == found.interval_steps == max(every, key=every.__getitem__)
    assert found.goodput == max(every.values())
    assert dear.days == pytest.approx(plain.days / found.goodput)
    assert dear.usd == pytest.approx(plain.usd / found.goodput)
    assert found.failures == pytest.approx(dear.days * 86400 / found.between_s)


def test_an_interval_and_a_save_that_are_given_are_counted():
    step = estimate(run_of("fsdp=8", 8), find_cluster(None, "h100", 8))
    given = FailureTerms(gpu_hours=500, restart_s=0, save_s=100, interval_steps=7)
    found = bill(step, Terms(tokens=10**12, failures=given)).interruptions
    assert found is not None and found.interval_steps == 7
    x, d = 7 * step.step_s / found.between_s, 100 / found.between_s
    assert found.goodput == pytest.approx(x / math.expm1(x + d))
    assert found.best_interval_steps > 7
