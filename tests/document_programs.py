"""Small programs over packed documents, on a flat mesh, in a pipeline and on a ring."""

import dataclasses
import functools

from tests.gpu_programs import FAST, MODEL, compile_once
from ultrascale_jax.config import Config, ContextConfig, DataConfig, MeshConfig, TrainConfig
from ultrascale_jax.hlo.attention import attention_calls
from ultrascale_jax.kernels.document_classes import class_lengths, class_segments
from ultrascale_jax.parallel.context.document_loops import TILE
from ultrascale_jax.plan.compiled.compile import CompiledStep

PIECE = 2048
"""Tokens of a rank's row."""


def assert_no_mask(step: CompiledStep) -> None:
    """Refuse a program with an array of a row's tokens by its tokens."""
    bodies = step.module.computations.values()
    squares = [i.name for body in bodies for i in body for a in i.arrays if a.dims.count(PIECE) > 1]
    assert squares == []


def check_documents(**mesh: int) -> None:
    """Assert that the program on this mesh attends by classes of lengths and has no mask."""
    cfg = Config(
        model=dataclasses.replace(MODEL, num_layers=mesh.get("pp", 1)),
        mesh=MeshConfig(**mesh),
        data=DataConfig(seq_len=PIECE),
        train=TrainConfig(global_batch=16, microbatches=2, remat="selective"),
    )
    step = compile_once(cfg, 8, tuple(FAST.items()))
    assert_no_mask(step)
    tokens = 8 // cfg.mesh.batch * PIECE
    classes = list(zip(class_lengths(PIECE), class_segments(PIECE), strict=True))
    calls = attention_calls(step.module)
    assert {(call.backward, call.operands[0].dims, call.segments) for call in calls} == {
        (backward, (tokens // L, L, MODEL.num_heads, MODEL.head_dim), M)
        for backward in (False, True)
        for L, M in classes
    }


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


def check_packed(strategy: str) -> None:
    """Assert that own documents are packed and that blocks of others have lengths."""
    cfg, step = on_a_ring(strategy)
    chunk, heads = PIECE // cfg.cp.chunks, MODEL.num_heads
    assert_no_mask(step)
    calls = [*attention_calls(step.module)]
    own = {(call.backward, call.scores[3], call.segments) for call in calls if not call.by_lengths}
    classes = zip(class_lengths(PIECE), class_segments(PIECE), strict=True)
    assert own == {(backward, L, M) for L, M in classes for backward in (False, True)}
    blocks = {call.scores for call in calls if call.by_lengths}
    assert blocks == {(1, heads, min(TILE, chunk), chunk)}


def check_hops(strategy: str) -> None:
    """Assert that a document of at most a chunk costs a hop a direction: keys both ways, the float32 sums home."""
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
