"""A step of a small model on H100s: what its layers communicate, keep and compute is what theory says."""

import math
import re

import pytest

from tests.gpu_programs import LAYERS, NAMED, SCALARS, compiled, layer_loops, matrices, pick
from ultrascale_jax.config import Config, Keep
from ultrascale_jax.hlo.collectives import Collective
from ultrascale_jax.plan.compiled.compile import CompiledStep, simulate_step
from ultrascale_jax.plan.compiled.op_costs import Operations
from ultrascale_jax.plan.compiled.timeline import simulate
from ultrascale_jax.plan.flops import attention_flops_per_token
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.model_shape import ModelShape

BF16, FLOAT32 = 2, 4

# Communication


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


# Recomputation


def run(remat: str | Keep) -> tuple[Config, CompiledStep]:
    """A run by its policy, and its step on H100s."""
    return compiled(8, {"fsdp": 8}, remat=remat)


def tokens(cfg: Config) -> int:
    """Tokens of one device in one step."""
    return cfg.train.global_batch * cfg.data.seq_len // 8


def layer_flops(cfg: Config, step: CompiledStep) -> int:
    """Operations of the matrix products in the loops over the layers, for one layer."""
    L = cfg.model.num_layers
    found = (m.flops * m.loops[-1] for m in step.matmuls if m.loops[-1:] in ((L,), (L // LAYERS,)))
    return sum(found) // L


def forward_flops(cfg: Config) -> int:
    """Operations of one layer's products with parameters, forward."""
    m = cfg.model
    widths = 2 * m.num_heads * m.head_dim + 2 * m.num_kv_heads * m.head_dim + 3 * m.d_ff
    return 2 * tokens(cfg) * m.d_model * widths


def attention_calls(step: CompiledStep) -> int:
    """Of one layer."""
    return sum(m.attention for m in step.matmuls) // LAYERS


@pytest.mark.parametrize("remat", ["none", "selective", NAMED])
def test_products_are_recomputed_only_where_the_policy_says(remat):
    cfg, step = run(remat)
    m = cfg.model
    # Nobody needs the result of w_down; w_o's is the residual, which has no name here.
    again = 2 * tokens(cfg) * m.d_model * m.num_heads * m.head_dim if remat == NAMED else 0
    assert layer_flops(cfg, step) == 3 * forward_flops(cfg) + again


def test_full_recomputes_all_products_but_the_last():
    cfg, step = run("full")
    last = 2 * tokens(cfg) * cfg.model.d_model * cfg.model.d_ff
    assert layer_flops(cfg, step) == 4 * forward_flops(cfg) - last


def test_attention_runs_again_only_under_full_recomputation():
    calls = [attention_calls(run(remat)[1]) for remat in ("none", "selective", NAMED, "full")]
    assert calls == [2, 2, 2, 3]


def test_what_is_kept_takes_memory():
    kept = [run(remat)[1].temporary_bytes for remat in ("full", NAMED, "selective", "none")]
    assert kept == sorted(kept) and len(set(kept)) == len(kept)


def test_no_recomputation_keeps_every_product_of_every_layer():
    cfg, step = run("none")
    m = cfg.model
    widths = 2 * m.num_heads * m.head_dim + 2 * m.num_kv_heads * m.head_dim + 2 * m.d_ff
    least = 2 * m.num_layers * tokens(cfg) * widths
    assert step.temporary_bytes - run("full")[1].temporary_bytes > least


def test_offloaded_tensors_live_on_the_host():
    cfg, step = run(NAMED)
    assert step.host_bytes == 2 * cfg.model.num_layers * tokens(cfg) * 2 * cfg.model.d_ff
    assert run("full")[1].host_bytes == 0


def test_copy_engines_move_offloaded_tensors():
    # XLA notes the place of a slice that is linear in the loop's counter; any other is the work of a kernel.
    text = run(NAMED)[1].text
    bodies = re.findall(r"^%\S*dynamic-\S*slice\S* \(.*?^}", text, re.DOTALL | re.MULTILINE)
    slices = [body for body in bodies if "S(5)" in body]
    assert len(slices) >= 4  # gate and up, there and back
    assert all("dynamic_slice_config" in one for one in slices)


def test_offloaded_tensors_travel_beside_the_layers():
    timeline = simulate_step(run(NAMED)[1], find_cluster(None, "h100", 8))
    assert timeline.link_s["copy",] > 0.1 * timeline.step_s
    assert timeline.waited_s["copy",] < 0.2 * timeline.link_s["copy",]


# Work


def test_a_compiled_step_does_the_operations_that_the_model_needs():
    cfg, step = run("selective")
    operations = Operations(step.module, step.gpu)
    flops = {"gemm": 0.0, "attention": 0.0, "other": 0.0}
    # A loop of unknown length is that of `models/loss.py`, which runs where a target is far below the highest logit.
    for name, loops in step.module.walk():
        for instruction in step.module.computations[name] if None not in loops else ():
            if instruction.opcode not in ("while", "call", "conditional"):
                operation = operations.find(name, instruction)
                if operation is not None:
                    flops[operation.kind] += operation.flops * math.prod(loops)
    assert flops["gemm"] == pytest.approx(6 * ModelShape.of(cfg.model).active_params * tokens(cfg))
    # Backward runs the first of the forward pass's two products again.
    needed = attention_flops_per_token(cfg.model, cfg.data.seq_len) * tokens(cfg)
    assert flops["attention"] == pytest.approx(needed * 7 / 6)

    timeline = simulate(step.module, step.axes, find_cluster(None, "h100", 8))
    assert timeline.link_s.keys() >= {("all-gather", "fsdp"), ("reduce-scatter", "fsdp")}
    assert sum(timeline.busy_s.values()) + timeline.idle_s == pytest.approx(timeline.step_s)
    assert sum(timeline.waited_s.values()) == pytest.approx(timeline.idle_s)
    assert sum(timeline.work_s.values()) == pytest.approx(sum(timeline.busy_s.values()))
    assert {block for kind, block in timeline.work_s if kind == "attention"} == {"attention"}
    products = {block for kind, block in timeline.work_s if kind == "gemm"}
    assert products == {"attention", "mlp", "loss"}
