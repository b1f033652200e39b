"""In fp8 every product of the layers is cuBLASLt's fp8 product on H100s; none silently stays bfloat16."""

import math
import re

from tests.gpu_programs import (
    FAST,
    HEAD,
    LAYERS,
    MATRICES,
    compile_once,
    compiled,
    fp8_products,
    matrices,
    pick,
)
from tests.planned_memory import assert_as_planned, config
from ultrascale_jax.hlo.program import BLOCK_SCALED


def test_each_product_is_fp8_and_zero3_gathers_bytes():
    cfg, step = compiled(8, {"fsdp": 8}, precision="fp8", remat="full")
    # Forward, again but for the last of a layer, and the two gradients.
    fp8 = MATRICES + MATRICES - 1 + 2 * MATRICES
    assert fp8_products(step) == {"fp8": LAYERS * fp8, "bf16": HEAD}
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


def test_matrices_below_adapters_rest_in_bytes_and_no_step_quantises_them():
    cfg = config("lora-on-fp8")
    step = compile_once(cfg, 8, tuple(FAST.items()))
    assert_as_planned(step)
    fp8 = MATRICES + MATRICES - 1 + MATRICES
    assert fp8_products(step)["fp8"] == LAYERS * fp8
    [arguments] = re.findall(r"entry_computation_layout=\{\((.*?)\)->", step.text)
    sizes = [
        math.prod(map(int, dims.split(",")))
        for dims in re.findall(r"f8e4m3fn\[([\d,]+)\]", arguments)
    ]
    assert sum(sizes) == cfg.model.num_layers * sum(matrices(cfg).values()) // 8
    in_layers = [c for c in step.collectives if c.kind == "all-gather" and c.loops]
    kinds = [a for c in in_layers for a in c.operands if a.dtype == "u8"]
    assert sum(a.bytes for a in kinds) == 2 * LAYERS * sum(matrices(cfg).values()) // 8
    amaxes = cfg.model.num_layers * MATRICES
    assert not re.findall(rf"all-reduce-start\S* = \(\(?f32\[{amaxes}\]", step.text)


def test_products_have_a_scale_for_32_elements_and_each_pass_gathers_its_own_orientation():
    cfg, step = compiled(8, {"fsdp": 8}, precision="mxfp8", remat="none", gpu="b200")
    products = [line for line in step.text.splitlines() if BLOCK_SCALED in line]
    assert len(products) == LAYERS * 3 * MATRICES
    assert fp8_products(step) == {"fp8": 0, "bf16": HEAD}
    # A device has 1,024 tokens; the widest products multiply them by [512, 1536].
    assert max(m.flops for m in step.matmuls) == 2 * 1024 * 512 * 1536
    in_layers = [c for c in pick(step.collectives, "all-gather", "fsdp") if c.loops]
    assert {array.dtype for c in in_layers for array in c.operands} == {"u8"}
    values = sum(matrices(cfg).values()) // 8
    assert [c.operand_bytes for c in in_layers] == [values + values // 32] * 2 * LAYERS
