"""Distillation in the whole step: on meshes as on one device, and from a teacher of another size."""

import dataclasses

import jax
import pytest

from tests.parity.comparison import compare
from tests.runs import change
from tests.states import bytes_at_rest
from tests.teachers import DISTILL, SIZES, TEACHER
from ultrascale_jax.config import (
    Config,
    DataConfig,
    Distill,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from ultrascale_jax.plan.formulas import memory
from ultrascale_jax.plan.formulas.activations import loss_chunks
from ultrascale_jax.plan.formulas.parameters import weights_of
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.state import abstract_batch, abstract_state

CFG = Config(
    model=ModelConfig(d_model=32, d_ff=64, num_layers=2, tied_embeddings=True, **SIZES),
    data=DataConfig(source="synthetic", seq_len=32),
    optim=OptimConfig(lr=1e-2, warmup_steps=2),
    train=TrainConfig(
        steps=1,
        global_batch=16,
        microbatches=2,
        precision="fp32",
        distill=DISTILL,
    ),
)


def test_the_teacher_rests_as_the_planner_counts_it():
    cfg = change(CFG, train={"precision": "bf16"}, mesh={"fsdp": 2, "tp": 2}).check(4)
    state = abstract_state(cfg, make_mesh(cfg.mesh, jax.devices()[:4]))
    assert {s.dtype.name for s in jax.tree.leaves(state.reference) if s.ndim > 2} == {"bfloat16"}
    run = Run.of(cfg, 4)
    planned = sum(n for part, n in memory.state(run, weights_of(run)).items() if part != "batch")
    assert planned == pytest.approx(bytes_at_rest(state), rel=0.01)
    teacher, plain = (
        Run.of(change(cfg, model=fields, train={"distill": Distill()}), 4)
        for fields in (dataclasses.asdict(TEACHER), {})
    )
    assert run.step_flops == pytest.approx(plain.step_flops + teacher.step_flops / 3)
    cluster = find_cluster(None, "h100", 4)
    assert estimate(run, cluster).parts["reference"] > 0


def test_what_is_stored_of_a_teacher_is_counted_with_the_batch_and_nothing_runs():
    stored = {"distill": Distill(teacher="topk:x", top_k=5)}
    cfg = change(CFG, train=stored, mesh={"fsdp": 2}).check(2)
    mesh = make_mesh(cfg.mesh, jax.devices()[:2])
    assert abstract_state(cfg, mesh).reference is None
    sizes = [array.size * array.dtype.itemsize for array in abstract_batch(cfg, mesh).values()]
    run = Run.of(cfg, 2)
    assert memory.state(run, weights_of(run))["batch"] == sum(sizes) / 2
    plain, online = (
        Run.of(change(cfg, train=train), 2)
        for train in ({"distill": Distill()}, {"distill": CFG.train.distill})
    )
    assert run.step_flops == plain.step_flops < online.step_flops
    assert loss_chunks(run) == loss_chunks(online)


def test_a_mesh_gives_the_losses_and_gradients_of_one_device():
    """By night `test_meshes.py` has adapters and the reverse divergence on other meshes."""
    cfg = change(CFG, mesh={"cp": 2, "fsdp": 2, "tp": 2})
    compare(cfg.check(8), seeds=(0,))
