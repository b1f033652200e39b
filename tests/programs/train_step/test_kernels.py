"""The section `kernels`: each of its fields puts a kernel into the program of a step, and none is there unasked."""

import contextlib
import dataclasses
import re

import jax
import pytest

from tests.runs import change
from ultrascale_jax.config import (
    Config,
    DataConfig,
    Experts,
    KernelsConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
    UserError,
)
from ultrascale_jax.hlo.deviceless import target_checks
from ultrascale_jax.plan.compiled.compile import target_devices
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.precision import check_kernels
from ultrascale_jax.train_step.state import abstract_batch, abstract_state
from ultrascale_jax.train_step.step import make_train_step

MODEL = ModelConfig(
    vocab_size=256, d_model=256, d_ff=256, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=128
)
MIXED = dataclasses.replace(MODEL, experts=Experts(num=2, top_k=1, dense_layers=1))

KERNELS = {
    "attention": {"attention", "attention_dkv", "attention_dq"},
    "norm": {"rms_norm_backward"},
    "loss": {"linear_cross_entropy", "linear_cross_entropy_gradient"},
    "grouped_matmul": {"grouped_matmul", "grouped_matmul_weight_gradient"},
    "fp8_matmul": {"fp8_matmul", "quantize_fp8"},
}


def kernels_of_a_step(model: ModelConfig, precision: str, kernels: KernelsConfig) -> set[str]:
    """The names of our kernels in a step on one H100."""
    cfg = Config(
        model=model,
        mesh=MeshConfig(fsdp=1),
        data=DataConfig(source="synthetic", seq_len=256),
        train=TrainConfig(global_batch=1, precision=precision),
        kernels=kernels,
    )
    mesh = make_mesh(cfg.mesh, target_devices(1))
    with jax.set_mesh(mesh), target_checks((9, 0), 91000):
        step = make_train_step(cfg).trace(abstract_state(cfg, mesh), abstract_batch(cfg, mesh))
    names = set().union(*KERNELS.values())
    return set(re.findall(r"\bname=(\w+)", str(step.jaxpr))) & names


def test_every_kernel_is_in_the_program_of_a_run_that_asks_for_it():
    assert {*KERNELS} == {field.name for field in dataclasses.fields(KernelsConfig)}
    of_bf16 = [name for name in KERNELS if name != "fp8_matmul"]
    asked = KernelsConfig(**dict.fromkeys(of_bf16, "mosaic"))
    wanted = set().union(*(KERNELS[name] for name in of_bf16))
    assert kernels_of_a_step(MIXED, "bf16", asked) == wanted
    assert kernels_of_a_step(MIXED, "bf16", KernelsConfig()) == set()


@pytest.mark.parametrize(("choice", "taken"), [("auto", True), ("xla", False)])
def test_scales_for_blocks_take_their_kernels_on_an_h100_unless_told_not_to(choice, taken):
    found = kernels_of_a_step(MODEL, "fp8_block", KernelsConfig(fp8_matmul=choice))
    assert found == (KERNELS["fp8_matmul"] if taken else set())


PACKED = Config(
    model=MODEL,
    data=DataConfig(seq_len=8192),
    kernels=KernelsConfig(attention="cudnn_packed"),
)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, None),
        ({"data": {"seq_len": 1000}}, "1000.*128"),
        ({"model": {"head_dim": 100}}, "8192.*100"),
        ({"mesh": {"cp": 4}}, None),
        ({"mesh": {"cp": 8}}, ": needs rows of 2048 tokens or more"),
        ({"mesh": {"cp": 8}, "data": {"document_mask": False}}, None),
    ],
)
def test_forced_packed_attention_is_refused_for_rows_and_heads_that_cannot_be(sections, message):
    """A place of a ring has a part of the row; without documents nothing is packed."""
    refused = pytest.raises(UserError, match=rf"^kernels\.attention='cudnn_packed'.*{message}")
    with refused if message else contextlib.nullcontext():
        check_kernels(change(PACKED, **sections), target_devices(1)[0])
