"""In fp8 every product of the layers is cuBLASLt's fp8 product on H100s; none silently stays bfloat16."""

import re

import pytest

from tests.hlo.conftest import LAYERS
from ultrascale_jax.config import Experts
from ultrascale_jax.plan.compiled.compile import CompiledStep

MATRICES = 7
"""Of a layer: q, k, v, o, gate, up, down."""

HEAD = 5
"""Products of the head, in bfloat16: logits and two gradients, and twice the logits in the loop of `models/loss.py`
that runs where a target is far below the highest logit."""


def gemms(step: CompiledStep) -> list[str]:
    """cuBLASLt's products in the text of the program; a loop's are there once."""
    return [line for line in step.text.splitlines() if 'target="__cublas' in line]


def products(step: CompiledStep) -> dict[str, int]:
    """Number of them."""
    low = sum("$f8" in line for line in gemms(step))
    return {"fp8": low, "bf16": len(gemms(step)) - low}


@pytest.mark.slow
def test_each_product_is_fp8_and_zero3_gathers_bytes(compiled):
    cfg, step = compiled(8, {"fsdp": 8}, precision="fp8", remat="full")
    # Forward, again but for the last of a layer, and the two gradients.
    fp8 = MATRICES + MATRICES - 1 + 2 * MATRICES
    assert products(step) == {"fp8": LAYERS * fp8, "bf16": HEAD}
    gathers = [c for c in step.collectives if c.kind == "all-gather"]
    in_layers = [c for c in gathers if c.loops]
    assert len(in_layers) == 2 * LAYERS
    assert {array.dtype for c in in_layers for array in c.operands} == {"u8"}
    # Outside there are the first layers of both passes, in bytes too, in bfloat16 the head alone, and token ids:
    # the embedding's table stays where it is.
    others = [array for c in gathers if not c.loops for array in c.operands]
    assert {array.dtype for array in others} == {"u8", "bf16", "s32"}
    head = sum(array.bytes for array in others if array.dtype == "bf16")
    assert head == 2 * cfg.model.vocab_size * cfg.model.d_model // 8
    ids = sum(array.bytes for array in others if array.dtype == "s32")
    assert ids == 4 * cfg.train.global_batch // 8 * cfg.data.seq_len
    # A norm's kernel finds the largest magnitudes itself, and writes none in float32 for another to read.
    batch, T, D = cfg.train.global_batch // 8, cfg.data.seq_len, cfg.model.d_model
    assert not re.search(rf" = f32\[{batch},{T},{D}\]\S* fusion\(", step.text)
    amaxes = cfg.model.num_layers * MATRICES
    assert len(re.findall(rf"all-reduce-start\S* = \(\(?f32\[{amaxes}\]", step.text)) == 1


@pytest.mark.wide
def test_rows_have_scales_of_their_own_and_cublaslt_multiplies(compiled):
    _, step = compiled(8, {"fsdp": 2, "sp": 4}, precision="fp8_rowwise", zero=1, remat="none")
    assert products(step) == {"fp8": 3 * MATRICES, "bf16": HEAD}


# Implied by test_what_is_kept_of_an_activation_is_a_byte_each in models/test_fp8.py.
@pytest.mark.wide
@pytest.mark.slow
def test_activations_are_kept_in_bytes_and_gathered_weights_are_not_kept(compiled):
    mesh, run = {"fsdp": 8}, {"remat": "none", "zero": 3}
    _, plain = compiled(8, mesh, precision="bf16", **run)
    cfg, step = compiled(8, mesh, precision="fp8", **run)
    assert products(step) == {"fp8": LAYERS * 3 * MATRICES, "bf16": HEAD}
    model, tokens = cfg.model, cfg.data.seq_len * cfg.train.global_batch // 8
    # Kept as bytes: the inputs of attention, of its output, of gate and up, and of down.
    widths = 2 * model.d_model + model.num_heads * model.head_dim + model.d_ff
    saved = plain.temporary_bytes - step.temporary_bytes
    assert saved > 0.9 * tokens * widths * model.num_layers
    # No stack over layers of whole matrices.
    whole = rf"u8\[{model.num_layers},{model.d_model},(?:{model.d_ff}|{model.num_heads},)"
    assert not re.search(whole, step.text)


@pytest.mark.wide
def test_gradients_of_weights_may_stay_bfloat16(compiled):
    _, step = compiled(8, {"fsdp": 8}, precision="fp8_rowwise", fp8={"wgrad": "bf16"}, remat="none")
    assert products(step) == {"fp8": LAYERS * 2 * MATRICES, "bf16": LAYERS * MATRICES + HEAD}


# Implied by models/test_fp8.py, and by kernels/test_fp8_matmul.py on the same shapes.
@pytest.mark.wide
@pytest.mark.slow
def test_scales_for_blocks_are_our_kernels(compiled):
    _, step = compiled(8, {"fsdp": 8}, precision="fp8_block", remat="none")
    assert products(step) == {"fp8": 0, "bf16": HEAD}
    calls = re.findall(
        r"(\w+)\[[\d,]+\]\S* custom-call\([^\n]*mosaic_gpu[^\n]*fp8_matmul", step.text
    )
    assert len(calls) == LAYERS * 3 * MATRICES


# Loops around the layers of the other tests.
@pytest.mark.wide
def test_accumulation_and_pipelines_lose_no_fp8_product(compiled):
    run = {"precision": "fp8", "microbatches": 4, "global_batch": 32, "remat": "none"}
    _, accumulated = compiled(8, {"fsdp": 4, "sp": 2}, zero=2, **run)
    assert products(accumulated) == {"fp8": 3 * MATRICES, "bf16": HEAD}
    _, pipelined = compiled(8, {"pp": 2, "fsdp": 4}, **run)
    heads = len(re.findall(r"loss[^\n]*dot_general", "\n".join(gemms(pipelined))))
    found = products(pipelined)
    # Loops over layers: two of forward alone, one of forward and backward, one of backward alone.
    assert found == {"fp8": (1 + 1 + 3 + 2) * MATRICES, "bf16": heads}


# models/test_fp8.py has the products of experts, kernels/test_fp8_matmul.py their kernels on H100s.
@pytest.mark.wide
def test_experts_are_batched_fp8_products(compiled):
    experts = Experts(num=8, top_k=2, d_ff=512)
    _, step = compiled(8, {"ep": 8}, experts=experts, precision="fp8", remat="none")
    batched = [line for line in gemms(step) if "moe" in line and "$f8" in line]
    # In a layer forward and two gradients; in the loops of further rounds forward, and again but for the last.
    assert len(batched) == LAYERS * ((3 + 6) + 3 + (2 + 6))
    others = [line for line in gemms(step) if "moe" in line and "$f8" not in line]
    router = LAYERS * 3
    assert len(others) == router and all("= (f32[" in line for line in others)
    attention = [line for line in gemms(step) if "attention" in line]
    assert len(attention) == LAYERS * 3 * 4 and all("$f8" in line for line in attention)
