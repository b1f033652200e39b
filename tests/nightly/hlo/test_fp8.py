"""The products of further fp8 programs: each kind of scale, accumulation, pipelines, experts."""

import re
from collections import Counter

import pytest

from tests.gpu_programs import HEAD, LAYERS, MATRICES, compiled, fp8_products, gemms
from ultrascale_jax.config import Experts

ACCUMULATED = {"precision": "fp8", "microbatches": 4, "global_batch": 32, "remat": "none"}


@pytest.mark.parametrize(
    ("mesh", "run", "expected"),
    [
        ({"fsdp": 2, "sp": 4}, {"precision": "fp8_rowwise", "zero": 1}, (3 * MATRICES, 0)),
        (
            {"fsdp": 8},
            {"precision": "fp8_rowwise", "fp8": {"wgrad": "bf16"}},
            (LAYERS * 2 * MATRICES, LAYERS * MATRICES),
        ),
        ({"fsdp": 4, "sp": 2}, {**ACCUMULATED, "zero": 2}, (3 * MATRICES, 0)),
    ],
    ids=["a scale a row", "weights' gradients in bfloat16", "accumulated"],
)
def test_every_product_of_the_layers_is_cublaslts(mesh, run, expected):
    _, step = compiled(8, mesh, **({"remat": "none"} | run))
    low, high = expected
    assert fp8_products(step) == {"fp8": low, "bf16": high + HEAD}


def test_scales_for_blocks_are_our_kernels():
    _, step = compiled(8, {"fsdp": 8}, precision="fp8_block", remat="none")
    assert fp8_products(step) == {"fp8": 0, "bf16": HEAD}
    calls = re.findall(r" custom-call\([^\n]*mosaic_gpu[^\n]*fp8_matmul", step.text)
    assert len(calls) == LAYERS * 3 * MATRICES


def test_a_pipeline_loses_no_fp8_product():
    _, step = compiled(8, {"pp": 2, "fsdp": 4}, **ACCUMULATED)
    heads = len(re.findall(r"loss[^\n]*dot_general", "\n".join(gemms(step))))
    # Loops over layers: two of forward alone, one of forward and backward, one of backward alone.
    assert fp8_products(step) == {"fp8": (1 + 1 + 3 + 2) * MATRICES, "bf16": heads}


def test_experts_are_batched_fp8_products():
    experts = Experts(num=8, top_k=2, d_ff=512)
    _, step = compiled(8, {"ep": 8}, experts=experts, precision="fp8", remat="none")
    batched = [line for line in gemms(step) if "moe" in line and "$f8" in line]
    # A first and a later round of an exchange, in each of them a first and a later one of the expert's rows: three
    # products forward and two gradients of each; all but the very first compute gate and up again.
    rounds = 2 * 2
    assert len(batched) == LAYERS * (rounds * (3 + 6) + (rounds - 1) * 2)
    router = [line for line in gemms(step) if "moe" in line and "$f8" not in line]
    assert len(router) == LAYERS * 3 and all("= (f32[" in line for line in router)
    attention = [line for line in gemms(step) if "attention" in line]
    assert len(attention) == LAYERS * 3 * 4 and all("$f8" in line for line in attention)


def test_products_of_experts_have_a_scale_for_32_elements():
    _, step = compiled(
        4, {"fsdp": 2, "ep": 2}, precision="mxfp8", remat="none", gpu="b200",
        experts=Experts(num=4, top_k=2, d_ff=512),
    )  # fmt: skip
    by_name = step.module.by_name
    dots = [
        dot
        for m in step.matmuls
        for dot in step.module.dots(by_name[m.computation][m.name], m.computation)
    ]
    assert Counter(dot.dtype for dot in dots if dot.dtype != "f8e4m3fn") == {
        "bf16": HEAD,
        "f32": LAYERS * 3,  # the router's
    }
    assert {dot.dtype for dot in dots if dot.batch == 2} == {"f8e4m3fn"}
