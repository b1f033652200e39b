"""Packed documents in the program of a flat mesh, and of a ring; `tests/nightly/hlo` has their times."""

import dataclasses
import functools

import pytest

from tests.gpu_programs import FAST, MODEL, compile_once
from ultrascale_jax.config import Config, ContextConfig, DataConfig, MeshConfig, TrainConfig
from ultrascale_jax.hlo.attention import attention_calls
from ultrascale_jax.kernels.document_classes import class_lengths, class_segments
from ultrascale_jax.parallel.context.document_loops import TILE

PIECE = 2048


def check_documents(**mesh: int) -> None:
    """Assert that the program on this mesh attends by classes of lengths and has no mask."""
    cfg = Config(
        model=MODEL,
        mesh=MeshConfig(**mesh),
        data=DataConfig(seq_len=2048),
        train=TrainConfig(global_batch=16, microbatches=2, remat="selective"),
    )
    step = compile_once(cfg, 8, tuple(FAST.items()))
    bodies = step.module.computations.values()
    squares = [i.name for body in bodies for i in body for a in i.arrays if a.dims.count(2048) > 1]
    assert squares == []
    tokens = 8 // cfg.mesh.batch * 2048
    classes = list(zip(class_lengths(2048), class_segments(2048), strict=True))
    calls = attention_calls(step.module)
    assert {(call.backward, call.operands[0].dims, call.segments) for call in calls} == {
        (backward, (tokens // L, L, MODEL.num_heads, MODEL.head_dim), M)
        for backward in (False, True)
        for L, M in classes
    }


def test_documents_are_a_call_for_each_class_of_lengths_and_no_mask():
    check_documents(fsdp=8)


@functools.cache
def on_a_ring(strategy: str):
    """A step over 8 ranks of a ring, whose places have rows long enough to pack."""
    cfg = Config(
        model=dataclasses.replace(MODEL, num_layers=1),
        mesh=MeshConfig(cp=8),
        cp=ContextConfig(strategy=strategy),
        data=DataConfig(seq_len=8 * PIECE),
        train=TrainConfig(global_batch=1, microbatches=1, remat="selective"),
    )
    return cfg, compile_once(cfg.check(8), 8, tuple(FAST.items()))


@pytest.mark.parametrize("strategy", ["ring", "zigzag"])
def test_on_a_ring_own_documents_are_packed_and_blocks_of_others_have_lengths(strategy):
    cfg, step = on_a_ring(strategy)
    chunk, heads = PIECE // cfg.cp.chunks, MODEL.num_heads
    squares = [i.name for body in step.module.computations.values() for i in body for a in i.arrays
               if {*a.dims} >= {PIECE} and a.dims.count(PIECE) > 1]  # fmt: skip
    assert squares == []
    calls = [*attention_calls(step.module)]
    own = {(call.backward, call.scores[3], call.segments) for call in calls if not call.by_lengths}
    classes = zip(class_lengths(PIECE), class_segments(PIECE), strict=True)
    assert own == {(backward, L, M) for L, M in classes for backward in (False, True)}
    blocks = {call.scores for call in calls if call.by_lengths}
    assert blocks == {(1, heads, min(TILE, chunk), chunk)}


@pytest.mark.parametrize("strategy", ["ring", "zigzag"])
def test_outside_of_loops_over_hops_keys_go_one_hop_and_their_gradients_come_back(strategy):
    """A document of at most a chunk costs a hop a direction: keys forward and backward, the float32 sums home."""
    cfg, step = on_a_ring(strategy)
    keys = 2 * PIECE * MODEL.num_kv_heads * MODEL.head_dim
    sent = [c for c in step.collectives if c.kind == "collective-permute"]
    fixed = [c for c in sent if None not in c.loops]
    assert all(c.asynchronous for c in fixed)
    layers, ways = cfg.model.num_layers, cfg.cp.chunks
    assert sum(c.step_operand_bytes for c in fixed) == layers * ways * keys * (2 + 2 + 4)
    # In loops that no document of a chunk enters: forward, to the farthest place, and back with the sums, by one hop
    # less, and that of the sums on its own.
    in_loops = sum(c.operand_bytes for c in sent if None in c.loops)
    assert in_loops == ways * keys * (2 + 2 + (2 + 4) + 4)


def test_keys_forward_and_sums_backward_travel_beside_the_ranks_own_documents():
    """Backward a rank waits for the keys of the one before."""
    _, step = on_a_ring("ring")
    attention = {call.instruction.name for call in attention_calls(step.module)}
    hidden = []
    for name, loops in step.module.walk():
        body = step.module.computations[name]
        places = {i.name: place for place, i in enumerate(body)}
        for end in body:
            if end.opcode == "collective-permute-done" and None not in loops:
                between = {i.name for i in body[places[end.operands[0]] : places[end.name]]}
                hidden.append((end.arrays[0].dtype, bool(between & attention)))
    assert sorted(hidden) == [("bf16", False), ("bf16", True), ("f32", True)]
