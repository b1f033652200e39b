"""In fp8 every product of the layers is cuBLASLt's fp8 product on H100s; none silently stays bfloat16."""

import re

import pytest

from ultrascale_jax.plan.compile import CompiledStep

MATRICES = 7
"""Of a layer: q, k, v, o, gate, up, down."""

HEAD = 3
"""Products of the head, in bfloat16: logits and two gradients."""


def products(step: CompiledStep) -> dict[str, int]:
    """cuBLASLt's products in the text of the program, by whether they are fp8; a loop's are there once."""
    targets = re.findall(r'custom_call_target="(__cublas\$lt\$matmul[^"]*)"', step.text)
    low = sum(target.endswith("$f8") for target in targets)
    return {"fp8": low, "bf16": len(targets) - low}


def test_each_product_is_fp8_and_zero3_gathers_fp8(compiled):
    cfg, step = compiled(8, {"fsdp": 8}, precision="fp8", remat="full")
    # Forward, again but for the last of a layer, and the two gradients.
    assert products(step) == {"fp8": MATRICES + MATRICES - 1 + 2 * MATRICES, "bf16": HEAD}
    gathers = re.findall(r"all-gather-start(?:\.\d+)? = \(\(([^)]*)\)", step.text)
    kinds = [set(re.findall(r"(f8e4m3fn|bf16|f32)\[", operands)) for operands in gathers]
    assert kinds.count({"f8e4m3fn"}) == 2 and kinds.count({"bf16"}) == 1 and len(kinds) == 3
    amaxes = cfg.model.num_layers * MATRICES
    assert len(re.findall(rf"all-reduce-start\S* = \(\(?f32\[{amaxes}\]", step.text)) == 1


def test_rows_have_scales_of_their_own_and_cublaslt_multiplies(compiled):
    _, step = compiled(8, {"fsdp": 2, "sp": 4}, precision="fp8_rowwise", zero=1, remat="none")
    assert products(step) == {"fp8": 3 * MATRICES, "bf16": HEAD}


def test_gradients_of_weights_may_stay_bfloat16_and_activations_are_kept_in_bytes(compiled):
    mesh = {"fsdp": 8}
    run = {"remat": "none", "zero": 3}
    _, plain = compiled(8, mesh, precision="bf16", **run)
    cfg, step = compiled(8, mesh, precision="fp8", **run)
    assert products(step) == {"fp8": 3 * MATRICES, "bf16": HEAD}
    model, tokens = cfg.model, cfg.data.seq_len * cfg.train.global_batch // 8
    # Kept as bytes: the inputs of attention, of its output, of gate and up, and of down.
    widths = 2 * model.d_model + model.num_heads * model.head_dim + model.d_ff
    saved = plain.temporary_bytes - step.temporary_bytes
    assert saved > 0.9 * tokens * widths * model.num_layers


@pytest.mark.slow
def test_pipelines_accumulation_and_experts_lose_no_fp8_product(compiled):
    run = {"precision": "fp8", "microbatches": 4, "global_batch": 32, "remat": "none"}
    _, accumulated = compiled(8, {"fsdp": 4, "sp": 2}, zero=2, **run)
    assert products(accumulated) == {"fp8": 3 * MATRICES, "bf16": HEAD}
    _, pipelined = compiled(8, {"pp": 2, "fsdp": 4}, **run)
    found = products(pipelined)
    assert found["fp8"] % MATRICES == 0 and found["bf16"] % HEAD == 0
