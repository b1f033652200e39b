"""The H100 program of packed documents: a call for each class of lengths, and no array of T x S."""

import pytest

from tests.hlo.conftest import FAST, MODEL
from ultrascale_jax.config import (
    Config,
    ContextConfig,
    DataConfig,
    KernelsConfig,
    MeshConfig,
    TrainConfig,
)
from ultrascale_jax.hlo.attention import attention_calls
from ultrascale_jax.kernels.document_classes import class_lengths, class_segments

T, GPUS = 2048, 8
MESHES = {
    "plain": MeshConfig(fsdp=8),
    "ulysses": MeshConfig(fsdp=4, cp=2),
    "pipeline": MeshConfig(pp=2, fsdp=4),
}


def squares(step) -> list[str]:
    """The arrays that have the sequence twice."""
    bodies = step.module.computations.values()
    arrays = {(i.name, a.dims) for body in bodies for i in body for a in i.arrays}
    return sorted(name for name, dims in arrays if dims.count(T) > 1)


def program(compile_once, place: str, kernel: str = "auto"):
    cfg = Config(
        model=MODEL,
        mesh=MESHES[place],
        data=DataConfig(seq_len=T),
        cp=ContextConfig(strategy="ulysses"),
        kernels=KernelsConfig(attention=kernel),
        train=TrainConfig(global_batch=16, microbatches=2, remat="selective"),
    )
    return compile_once(cfg, GPUS, tuple(FAST.items()))


@pytest.mark.parametrize(
    "place",
    [
        "plain",
        pytest.param("ulysses", marks=pytest.mark.wide),  # plain, between two all-to-alls
        pytest.param("pipeline", marks=pytest.mark.slow),
    ],
)
def test_documents_are_a_call_for_each_class_of_lengths_and_no_mask(compile_once, place):
    step = program(compile_once, place)
    assert squares(step) == []
    mesh = MESHES[place]
    tokens = 8 // mesh.batch * T
    heads = MODEL.num_heads // mesh.cp
    classes = list(zip(class_lengths(T), class_segments(T), strict=True))
    calls = attention_calls(step.module)
    assert {(call.backward, call.operands[0].dims, call.segments) for call in calls} == {
        (backward, (tokens // L, L, heads, MODEL.head_dim), M)
        for backward in (False, True)
        for L, M in classes
    }


@pytest.mark.wide
def test_a_mask_is_an_array_of_the_sequence_squared(compile_once):
    """So the test above would see it."""
    assert squares(program(compile_once, "plain", "cudnn"))
