"""The communication of the compiled step equals what the playbook's formulas say, in counts and in bytes."""

import math

from tests.gpu_programs import LAYERS, SCALARS, compiled, layer_loops, matrices, pick
from ultrascale_jax.hlo.collectives import Collective

BF16, FLOAT32 = 2, 4


def operands(found: list[Collective]) -> list[int]:
    """Sizes of all arrays that are given, in bytes; XLA may have put several into one collective."""
    return sorted(array.bytes for c in found for array in c.operands)


def test_zero3_gathers_each_matrix_once_forward_and_once_backward():
    cfg, step = compiled(8, {"fsdp": 8})
    sizes = LAYERS * list(matrices(cfg).values())
    for loop in layer_loops(step, cfg):
        gathers = pick(loop, "all-gather", "fsdp")
        assert operands(gathers) == sorted(size * BF16 // 8 for size in sizes)
        assert sum(c.result_bytes for c in gathers) == sum(sizes) * BF16


def test_zero3_scatters_each_gradient_once_per_layer():
    cfg, step = compiled(8, {"fsdp": 8})
    forward, backward = layer_loops(step, cfg)
    scatters = pick(backward, "reduce-scatter", "fsdp")
    sizes = LAYERS * list(matrices(cfg).values())
    assert operands(scatters) == sorted(size * BF16 for size in sizes)
    assert sum(c.result_bytes for c in scatters) == sum(sizes) * BF16 // 8
    assert pick(forward, "reduce-scatter", "fsdp") == []


def test_zero3_moves_nothing_else_in_the_layer_loops():
    cfg, step = compiled(8, {"fsdp": 8})
    forward, backward = layer_loops(step, cfg)
    assert {c.kind for c in forward} == {"all-gather"}
    assert {c.kind for c in backward} == {"all-gather", "reduce-scatter"}
    assert {c.axes for c in forward + backward} == {("fsdp",)}
    # XLA puts all asynchronous collectives on one stream, and says so in what it dumps.
    assert step.comm_streams == {c.name: 0 for c in step.collectives if c.asynchronous}


def test_sequence_parallel_half_blocks_gather_before_and_scatter_after():
    cfg, step = compiled(8, {"fsdp": 2, "sp": 4})
    whole = cfg.train.global_batch // 2 * cfg.data.seq_len * cfg.model.d_model * BF16
    forward, backward = layer_loops(step, cfg)
    assert operands(pick(forward, "all-gather", "sp")) == [whole // 4] * 2 * LAYERS
    assert operands(pick(forward, "reduce-scatter", "sp")) == [whole] * 2 * LAYERS
    # Recomputed: both gathers and attention's scatter (nothing needs the MLP's sum); transposed: two of each.
    assert operands(pick(backward, "all-gather", "sp")) == [whole // 4] * 4 * LAYERS
    assert operands(pick(backward, "reduce-scatter", "sp")) == [whole] * 3 * LAYERS
    assert not [c for c in forward + backward if c.kind == "all-reduce"]


def test_parameters_travel_behind_the_reductions_of_sequence_parallel_layers():
    """All share a stream: attention, which `full` runs again, and the MLP's input gradient would wait for them."""
    cfg, step = compiled(8, {"fsdp": 2, "sp": 4})
    _, backward = layer_loops(step, cfg)
    behind, travelling = 0, set()
    for c in backward:
        behind += c in pick([c], "reduce-scatter", "sp")
        travelling |= {behind % 3} if pick([c], c.kind, "fsdp") else set()
    # Of a layer's three scatters over sp the second is that of the MLP's input gradient.
    assert (behind, travelling) == (3 * LAYERS, {2})


def test_tensor_parallel_half_blocks_all_reduce_once_each_way():
    cfg, step = compiled(8, {"fsdp": 2, "tp": 4})
    whole = cfg.train.global_batch // 2 * cfg.data.seq_len * cfg.model.d_model * BF16
    forward, backward = layer_loops(step, cfg)
    assert operands(pick(forward, "all-reduce", "tp")) == [whole] * 2 * LAYERS
    # Attention's sum is recomputed, and each half-block sums the gradient of its input.
    assert operands(pick(backward, "all-reduce", "tp")) == [whole] * 3 * LAYERS


def test_accumulated_gradients_are_reduced_once_a_step():
    cfg, step = compiled(8, {"fsdp": 8}, zero=1, microbatches=2)
    m = cfg.model
    num_matrix = m.num_layers * sum(matrices(cfg).values()) + 2 * m.vocab_size * m.d_model
    num_vector = (2 * m.num_layers + 1) * m.d_model
    reduced = [c for c in step.collectives if c.kind in ("all-reduce", "reduce-scatter")]
    large = [array for c in reduced for array in c.operands if array.bytes > SCALARS]
    assert {array.dtype for array in large} == {"f32"}
    assert [c for c in reduced if c.loops and c.operand_bytes > SCALARS] == []
    scattered, summed = (
        sum(c.operand_bytes for c in reduced if c.kind == kind)
        for kind in ("reduce-scatter", "all-reduce")
    )
    assert scattered == num_matrix * FLOAT32
    # The others are the squares of nine matrices' gradients and first moments, and four sums of the metrics.
    assert 0 <= summed - num_vector * FLOAT32 <= (2 * 9 + 4) * FLOAT32


def test_zero1_gathers_the_parameters_once_a_step():
    cfg, step = compiled(8, {"fsdp": 8}, zero=1, microbatches=2)
    m = cfg.model
    num_matrix = m.num_layers * sum(matrices(cfg).values()) + 2 * m.vocab_size * m.d_model
    gathers = [c for c in step.collectives if c.kind == "all-gather"]
    assert {c.loops for c in gathers} == {()}
    assert sum(c.result_bytes for c in gathers) == num_matrix * BF16


def test_zero2_scatters_gradients_every_micro_batch():
    _, step = compiled(8, {"fsdp": 8}, zero=2, microbatches=2)
    scatters = [c for c in step.collectives if c.kind == "reduce-scatter"]
    assert {math.prod(c.loops[:1]) for c in scatters} == {2}
    assert not [c for c in step.collectives if c.kind == "all-gather" and c.loops]
