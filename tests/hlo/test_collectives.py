"""The communication of the compiled step equals what the playbook's formulas say, in counts and in bytes."""

import math

import pytest

from tests.hlo.conftest import LAYERS
from ultrascale_jax.config import Config
from ultrascale_jax.hlo.collectives import Collective
from ultrascale_jax.plan.compiled.compile import CompiledStep

BF16, FLOAT32 = 2, 4
SCALARS = 64
"""Loss, norm and counts travel too; anything below so many bytes is one of them."""


def matrices(cfg: Config) -> dict[str, int]:
    """Elements of each matrix of a block."""
    m = cfg.model
    q, kv, ffn = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim, m.d_ff
    widths = {"w_q": q, "w_k": kv, "w_v": kv, "w_o": q, "w_gate": ffn, "w_up": ffn, "w_down": ffn}
    return {name: m.d_model * width for name, width in widths.items()}


# The formulas on more than a host are those of 8 GPUs; hybrid sharding stays on 64.
SIZES = pytest.mark.parametrize("num_devices", [8, pytest.param(64, marks=pytest.mark.wide)])


def layer_loops(step: CompiledStep, cfg: Config) -> tuple[list[Collective], list[Collective]]:
    """Collectives of the forward and of the backward scan over the layers, of `LAYERS` each; the backward one has more
    matmuls."""
    trips = (cfg.model.num_layers // LAYERS,)
    bodies = {name: loops for name, loops in step.module.walk() if loops[-1:] == trips}
    work = {name: sum(m.computation == name for m in step.matmuls) for name in bodies}
    forward, backward = sorted((name for name in bodies if work[name]), key=work.__getitem__)
    return tuple(
        [c for c in step.collectives if c.computation == name] for name in (forward, backward)
    )


def pick(found: list[Collective], kind: str, *axes: str) -> list[Collective]:
    """Select collectives of one kind over exactly these axes that carry more than scalars."""
    return [c for c in found if c.kind == kind and c.axes == axes and c.operand_bytes > SCALARS]


def operands(found: list[Collective]) -> list[int]:
    """Sizes of all arrays that are given, in bytes; XLA may have put several into one collective."""
    return sorted(array.bytes for c in found for array in c.operands)


@SIZES
@pytest.mark.slow
def test_zero3_gathers_each_matrix_once_forward_and_once_backward(compiled, num_devices):
    cfg, step = compiled(num_devices, {"fsdp": num_devices})
    sizes = LAYERS * list(matrices(cfg).values())
    for loop in layer_loops(step, cfg):
        gathers = pick(loop, "all-gather", "fsdp")
        assert operands(gathers) == sorted(size * BF16 // num_devices for size in sizes)
        assert sum(c.result_bytes for c in gathers) == sum(sizes) * BF16


@pytest.mark.slow
@SIZES
def test_zero3_scatters_each_gradient_once_per_layer(compiled, num_devices):
    cfg, step = compiled(num_devices, {"fsdp": num_devices})
    forward, backward = layer_loops(step, cfg)
    scatters = pick(backward, "reduce-scatter", "fsdp")
    sizes = LAYERS * list(matrices(cfg).values())
    assert operands(scatters) == sorted(size * BF16 for size in sizes)
    assert sum(c.result_bytes for c in scatters) == sum(sizes) * BF16 // num_devices
    assert pick(forward, "reduce-scatter", "fsdp") == []


@pytest.mark.slow
def test_zero3_moves_nothing_else_in_the_layer_loops(compiled):
    cfg, step = compiled(8, {"fsdp": 8})
    forward, backward = layer_loops(step, cfg)
    assert {c.kind for c in forward} == {"all-gather"}
    assert {c.kind for c in backward} == {"all-gather", "reduce-scatter"}
    assert {c.axes for c in forward + backward} == {("fsdp",)}
    # XLA puts all asynchronous collectives on one stream, and says so in what it dumps.
    assert step.comm_streams == {c.name: 0 for c in step.collectives if c.asynchronous}


@pytest.mark.slow
def test_sequence_parallel_half_blocks_gather_before_and_scatter_after(compiled):
    cfg, step = compiled(8, {"fsdp": 2, "sp": 4})
    whole = cfg.train.global_batch // 2 * cfg.data.seq_len * cfg.model.d_model * BF16
    forward, backward = layer_loops(step, cfg)
    assert operands(pick(forward, "all-gather", "sp")) == [whole // 4] * 2 * LAYERS
    assert operands(pick(forward, "reduce-scatter", "sp")) == [whole] * 2 * LAYERS
    # Recomputed: both gathers and attention's scatter (nothing needs the MLP's sum); transposed: two of each.
    assert operands(pick(backward, "all-gather", "sp")) == [whole // 4] * 4 * LAYERS
    assert operands(pick(backward, "reduce-scatter", "sp")) == [whole] * 3 * LAYERS


@pytest.mark.slow
def test_parameters_travel_behind_the_reductions_of_sequence_parallel_layers(compiled):
    """All share a stream: attention, which `full` runs again, and the MLP's input gradient would wait for them."""
    cfg, step = compiled(8, {"fsdp": 2, "sp": 4})
    _, backward = layer_loops(step, cfg)
    behind, travelling = 0, set()
    for c in backward:
        behind += c in pick([c], "reduce-scatter", "sp")
        travelling |= {behind % 3} if pick([c], c.kind, "fsdp") else set()
    # Of a layer's three scatters over sp the second is that of the MLP's input gradient.
    assert (behind, travelling) == (3 * LAYERS, {2})


@pytest.mark.slow
def test_sequence_parallel_layers_never_all_reduce(compiled):
    cfg, step = compiled(8, {"fsdp": 2, "sp": 4})
    assert not [c for loop in layer_loops(step, cfg) for c in loop if c.kind == "all-reduce"]


@pytest.mark.slow
def test_tensor_parallel_half_blocks_all_reduce_once_each_way(compiled):
    cfg, step = compiled(8, {"fsdp": 2, "tp": 4})
    whole = cfg.train.global_batch // 2 * cfg.data.seq_len * cfg.model.d_model * BF16
    forward, backward = layer_loops(step, cfg)
    assert operands(pick(forward, "all-reduce", "tp")) == [whole] * 2 * LAYERS
    # Attention's sum is recomputed, and each half-block sums the gradient of its input.
    assert operands(pick(backward, "all-reduce", "tp")) == [whole] * 3 * LAYERS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "kind"),
    [pytest.param(0, "all-reduce", marks=pytest.mark.wide), (1, "reduce-scatter")],
)
def test_accumulated_gradients_are_reduced_once_a_step(compiled, zero, kind):
    cfg, step = compiled(8, {"fsdp": 8}, zero=zero, microbatches=2)
    m = cfg.model
    num_matrix = m.num_layers * sum(matrices(cfg).values()) + 2 * m.vocab_size * m.d_model
    num_vector = (2 * m.num_layers + 1) * m.d_model
    reduced = [c for c in step.collectives if c.kind in ("all-reduce", "reduce-scatter")]
    assert [c for c in reduced if c.loops and c.operand_bytes > SCALARS] == []
    assert {array.dtype for c in reduced for array in c.operands if array.bytes > SCALARS} == {
        "f32"
    }
    total = {k: sum(c.operand_bytes for c in reduced if c.kind == k) for k in ("all-reduce", kind)}
    if kind == "all-reduce":
        num_vector += num_matrix
    else:
        assert total[kind] == num_matrix * FLOAT32
    # The rest are the squares of nine matrices' gradients and first moments, and four sums of the metrics.
    assert 0 <= total["all-reduce"] - num_vector * FLOAT32 <= (2 * 9 + 4) * FLOAT32


@pytest.mark.slow
def test_zero1_gathers_the_parameters_once_a_step(compiled):
    cfg, step = compiled(8, {"fsdp": 8}, zero=1, microbatches=2)
    m = cfg.model
    num_matrix = m.num_layers * sum(matrices(cfg).values()) + 2 * m.vocab_size * m.d_model
    gathers = [c for c in step.collectives if c.kind == "all-gather"]
    assert {c.loops for c in gathers} == {()}
    assert sum(c.result_bytes for c in gathers) == num_matrix * BF16


@pytest.mark.slow
def test_zero2_scatters_gradients_every_micro_batch(compiled):
    _, step = compiled(8, {"fsdp": 8}, zero=2, microbatches=2)
    scatters = [c for c in step.collectives if c.kind == "reduce-scatter"]
    assert {math.prod(c.loops[:1]) for c in scatters} == {2}
    assert not [c for c in step.collectives if c.kind == "all-gather" and c.loops]


# Implied by the rows of ZeRO and by parity over dp x cp x sp.
@pytest.mark.wide
@pytest.mark.slow
def test_hybrid_sharding_reduces_only_the_shard_over_replicas(compiled):
    cfg, step = compiled(64, {"dp": 8, "fsdp": 8})
    m = cfg.model
    # The loop's first two iterations sum zeros, since no layer's gradient waits yet.
    num_matrix = (m.num_layers + 2) * sum(matrices(cfg).values()) + 2 * m.vocab_size * m.d_model
    forward, backward = layer_loops(step, cfg)
    assert {c.axes for c in forward} == {("fsdp",)}
    summed = pick(step.collectives, "all-reduce", "dp")
    # A layer's are summed beside the products of the next; those of embedding, head and first layer stay outside.
    assert {c.axes for c in backward} == {("fsdp",), ("dp",)}
    assert all(c.asynchronous and c.hidden_by_heavy for c in summed if c in backward)
    over_dp = [(array, math.prod(c.loops)) for c in summed for array in c.operands]
    assert {array.dtype for array, _ in over_dp} == {"f32"}
    assert sum(array.bytes * trips for array, trips in over_dp) == num_matrix // 8 * FLOAT32
