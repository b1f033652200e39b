"""The memory formulas: against sums by hand, and what must hold between runs (XLA's bytes: `test_xla_tables.py`)."""

import dataclasses
from typing import Any

import pytest

from ultrascale_jax.cli.command_line import load_recipe
from ultrascale_jax.config import Keep, KernelsConfig, MeshConfig, with_changes
from ultrascale_jax.configs import shapes
from ultrascale_jax.models.loss_chunks import num_chunks
from ultrascale_jax.plan.formulas import costs
from ultrascale_jax.plan.formulas.activations import layer_of, loss_chunks
from ultrascale_jax.plan.formulas.checkpoint import checkpoint
from ultrascale_jax.plan.formulas.host import HostMemory
from ultrascale_jax.plan.formulas.memory import breakdown, host_bytes
from ultrascale_jax.plan.formulas.parameters import weights_of
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.model_shape import ModelShape
from ultrascale_jax.plan.workload import Run

GIB = 2**30


def run_8b(mesh: dict[str, int] | None = None, **changes) -> Run:
    """Llama 3 8B on eight GPUs, fully sharded, one sequence of 8192 tokens a GPU."""
    sizes = MeshConfig(**({"fsdp": 8} if mesh is None else {"fsdp": 1} | mesh))
    fields: dict[str, Any] = {
        "seq_len": 8192,
        "sequences": 1,
        "shape": ModelShape.of(shapes.LLAMA3_8B),
    }
    return Run(**(fields | {"mesh": sizes} | changes))


def peak(*arguments, **changes) -> int:
    return breakdown(run_8b(*arguments, **changes)).peak_bytes


def activations(run: Run) -> float:
    """Bytes kept between forward and backward pass."""
    parts = breakdown(run).parts
    return sum(v for k, v in parts.items() if k.startswith("activations: ") and "logits" not in k)


def test_llama_8b_by_hand():
    # 8,030,261,248 parameters, of which 65 norms of 4,096 are whole on every GPU.
    vectors = 65 * 4096
    number = (8_030_261_248 - vectors) / 8 + vectors
    run = run_8b(remat="selective")
    parts = breakdown(run).parts
    assert parts["master parameters"] == 4 * number
    assert parts["optimizer state"] == 8 * number
    assert parts["batch"] == 3 * 4 * 8192
    # Inputs, two norms, attention's output; queries and attention's result; keys, values; gate, up; statistics.
    token = 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 2 * 14336) + 4 * 32
    assert activations(run) == 32 * 8192 * token
    # With recomputation of everything the layers' inputs stay.
    assert activations(run_8b(remat="full")) == 32 * 8192 * 2 * 4096


def test_the_host_holds_what_is_offloaded_of_one_micro_batch():
    run = run_8b(
        {"fsdp": 4, "sp": 2},
        remat=Keep(saved=("k", "v"), offloaded=("q", "attn_core", "attn_out", "gate", "up")),
    )
    m = run.shape
    # q, attention's result with its statistics, the residual stream of sp, gate and up.
    widths = 2 * (2 * m.num_heads * m.head_dim + m.d_model + 2 * m.d_ff) + 4 * m.num_heads
    assert host_bytes(run) == m.layers * run.tokens * widths / 2
    assert host_bytes(dataclasses.replace(run, microbatches=4)) == host_bytes(run)
    assert host_bytes(run_8b({"fsdp": 8}, remat="dots")) == 0
    inputs = run_8b({"fsdp": 4, "sp": 2}, remat=Keep(offloaded=("layer_input",)))
    assert host_bytes(inputs) == m.layers * inputs.tokens * 2 * m.d_model / 2


@pytest.mark.parametrize(
    ("optim", "width"),
    [
        ({"offload": "both"}, 8),
        ({"offload": "second"}, 4),
        ({"offload": "both", "moment_dtype": "bfloat16"}, 6),
        ({"offload": "both", "moment_dtype": "bfloat16", "stochastic_rounding": True}, 4),
        ({"offload": "both", "name": "muon"}, 4),
    ],
    ids=str,
)
def test_moments_of_the_layers_matrices_rest_on_the_host(optim, width):
    mesh = MeshConfig(fsdp=8)
    cfg = with_changes(load_recipe("llama3_8b"), mesh=mesh, remat="full", microbatches=64)
    run, plain = (
        Run.of(dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, **changes)), 8)
        for changes in (optim, optim | {"offload": "none"})
    )
    m = cfg.model
    widths = 2 * m.num_heads * m.head_dim + 2 * m.num_kv_heads * m.head_dim + 3 * m.d_ff
    moved = width * m.num_layers * m.d_model * widths // 8
    assert (host_bytes(run), host_bytes(plain)) == (moved, 0)
    assert breakdown(plain).peak_bytes - breakdown(run).peak_bytes == moved
    cluster = find_cluster(None, "h100", 8)
    step, before = (estimate(one, cluster) for one in (run, plain))
    assert step.step_s - before.step_s == pytest.approx(costs.host_seconds(cluster.gpu, 2 * moved))
    saved = checkpoint(run, cluster.gpu)
    assert HostMemory.of(step, saved, cluster).moment_bytes == 8 * moved


def test_kv_heads_are_repeated_for_a_larger_tensor_group():
    assert layer_of(run_8b({"sp": 8})).key == layer_of(run_8b({"sp": 16})).key == 8192 * 128
    assert weights_of(run_8b({"sp": 16})).attention == 2 * 4096 * 128 * (32 / 16 + 1)


def test_a_document_mask_is_one_square_of_the_sequence_and_packed_documents_have_none():
    ids, masked = 4 * 8192, KernelsConfig(attention="cudnn")
    # Packed, float32 gradients of the queries and a number of each, for four documents or, in rows of 4,096, eight.
    assert peak(document_mask=True) - peak() == ids + 4 * 4 * 8192 * 32 * 129
    eight = peak(document_mask=True, seq_len=4096) - peak(seq_len=4096)
    assert eight == ids / 2 + 4 * 8 * 4096 * 32 * 129
    assert peak(document_mask=True, kernels=masked) - peak() == 2 * 8192**2 + ids
    for seq_len in (1024, 8190):  # too short, and not in classes
        packed, plain = (peak(document_mask=x, seq_len=seq_len) for x in (True, False))
        assert packed - plain == 2 * seq_len**2 + 4 * seq_len
    # cuDNN takes no mask of an odd length: the scores are in memory.
    assert peak(document_mask=True, seq_len=8191) > 2 * peak(document_mask=True, seq_len=8190)


@pytest.mark.parametrize(
    ("seq_len", "sequences", "chunks"), [(8192, 1, 1), (4096, 4, 2), (8192, 4, 4), (512, 1, 1)]
)
def test_the_loss_is_cut_as_the_trainer_cuts_it(seq_len, sequences, chunks):
    run = run_8b(seq_len=seq_len, sequences=sequences)
    assert loss_chunks(run) == (chunks, seq_len * sequences * 128_256 * 2 / chunks)
    assert num_chunks(seq_len * sequences, 128_256, 2) == chunks


@pytest.mark.parametrize("model", [shapes.LLAMA3_8B, shapes.DEEPSEEK_V3], ids=["llama", "deepseek"])
def test_modules_of_multi_token_prediction_are_layers_projections_and_losses(model):
    shape = ModelShape.of(model, mtp_layers=2)
    weights = weights_of(run_8b({"dp": 8}, shape=shape, zero=0))
    found = weights.blocks + weights.tables + weights.vectors
    assert found == pytest.approx(shape.num_params, rel=1e-12)
    own = 2 * (2 * shape.d_model**2 + 3 * shape.d_model)
    assert (
        shape.num_params == ModelShape.of(model, num_layers=model.num_layers + 2).num_params + own
    )
    longer = run_8b(shape=ModelShape.of(model, num_layers=model.num_layers + 2))
    # In the last loss the head's gradients of both others wait.
    waiting = 2 * 4 * weights.table
    assert peak(shape=shape) > breakdown(longer).peak_bytes + waiting / 2
