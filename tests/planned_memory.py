"""Programs of few layers for eight H100s, in which each layer and option of fine-tuning stands once."""

from dataclasses import replace

import pytest

from tests.gpu_programs import NO_MACHINE_CODE
from ultrascale_jax.config import Config, DataConfig, MeshConfig, MoEConfig, TrainConfig
from ultrascale_jax.config.distill import Distill
from ultrascale_jax.config.lora import Lora
from ultrascale_jax.configs import shapes
from ultrascale_jax.plan.compiled.compile import CompiledStep, compile_step
from ultrascale_jax.plan.formulas.memory import breakdown

LORA = {"init_from": "hf:base", "lora": Lora(rank=16)}
EXPERTS = tuple(f"experts.{name}_proj" for name in ("gate", "up", "down"))
OF_EXPERTS = LORA | {"lora": Lora(rank=16, targets=("q_proj", *EXPERTS))}
LLAMA, QWEN = replace(shapes.LLAMA3_8B, num_layers=4), replace(shapes.QWEN3_8B, num_layers=4)
ROUTED = replace(shapes.QWEN3_30B_A3B, num_layers=4)
NEXT = shapes.QWEN3_NEXT_80B_A3B
NANO = shapes.NEMOTRON_3_NANO_30B_A3B
PAIRS = {"num_layers": 4, "full_attention_every": 2}
STUDENT = replace(shapes.LLAMA32_1B, num_layers=4)
ACCUMULATED = {"microbatches": 4}

PROGRAMS = {
    # With a gate behind attention, one of shared experts, and partial rotary embeddings.
    "gated-delta-rule": (
        "fsdp=2,ep=4",
        replace(NEXT, **PAIRS, experts=replace(NEXT.experts, num=64)),
        {},
    ),
    "mamba2": (
        "fsdp=4,cp=2",
        replace(shapes.GRANITE_4_H_MICRO, **PAIRS, full_attention_offset=0),
        {"remat": "selective"},
    ),
    # Rows of three layers, one of them a mixer alone, and a stack of one layer.
    "pattern": (
        "fsdp=8",
        replace(shapes.NEMOTRON_H_8B, pattern=2 * "M-M*-" + "M-", num_layers=7),
        {"remat": "selective"},
    ),
    "pattern-of-experts": (
        "fsdp=2,ep=4",
        replace(
            NANO, pattern=2 * "MEM*E" + "ME", num_layers=7, experts=replace(NANO.experts, num=64)
        ),
        {},
    ),
    "without-gate": ("fsdp=4,sp=2", replace(LLAMA, activation="relu2"), {}),
    "gemma4": ("fsdp=4,sp=2", replace(shapes.GEMMA4_31B, **PAIRS), {"remat": "selective"}),
    "partial-rotary": ("fsdp=8", replace(QWEN, rope_dim=32), {"remat": "none"}),
    "nope": ("fsdp=4,sp=2", replace(LLAMA, nope_every=2), {"remat": "none"}),
    "lora-on-experts": ("fsdp=2,ep=4", ROUTED, OF_EXPERTS),
    "folded-experts": ("fsdp=2,ep=2,sp=2", ROUTED, {"folding": True}),
    "lora-in-a-pipeline": ("pp=2,fsdp=4", LLAMA, LORA | ACCUMULATED),
    "lora-with-modules": ("fsdp=8", replace(LLAMA, mtp_layers=1), LORA),
    "lora-on-fp8": ("fsdp=8", LLAMA, LORA | {"precision": "fp8"}),
    "teacher": ("fsdp=8", STUDENT, {"distill": Distill(teacher="hf:teacher", model=LLAMA)}),
    "padded-vocabulary": (
        "pp=2,fsdp=2,sp=2",
        replace(STUDENT, vocab_size=128_001),
        ACCUMULATED,
    ),
}
"""Mesh, model and options of `train`, for one sequence of 4,096 tokens in each micro-batch."""


def config(name: str) -> Config:
    """Return the run of a program."""
    mesh, model, options = PROGRAMS[name]
    sizes = MeshConfig.parse(mesh)
    train = {"microbatches": 1, "remat": "full"} | options
    folding = train.pop("folding", False)
    return Config(
        model=model,
        mesh=sizes,
        moe=MoEConfig(folding=folding),
        data=DataConfig(seq_len=4096, document_mask=False),
        train=TrainConfig(**train, global_batch=sizes.batch * train["microbatches"]),
    )


def check_memory(name: str) -> None:
    """Compare a program's bytes by formula with XLA's, within 5%."""
    assert_as_planned(compile_step(config(name), 8, estimates=False, options=NO_MACHINE_CODE))


def assert_as_planned(step: CompiledStep) -> None:
    """Refuse a program whose bytes by formula are more than 5% from XLA's."""
    assert breakdown(step.run).planned_bytes == pytest.approx(step.peak_bytes, rel=0.05)
