"""The memory formulas: against XLA's bytes, against sums by hand, and what must hold between runs."""

import dataclasses
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from scripts.validation import xla_tables
from ultrascale_jax.config import Experts, Keep, KernelsConfig, MeshConfig
from ultrascale_jax.configs import shapes
from ultrascale_jax.models.loss_chunks import num_chunks
from ultrascale_jax.plan.formulas.activations import layer_of, loss_chunks, saved_bytes
from ultrascale_jax.plan.formulas.memory import breakdown, host_bytes, state, timeline, verdict
from ultrascale_jax.plan.formulas.parameters import sharded_params, weights_of
from ultrascale_jax.plan.hardware import find_gpu
from ultrascale_jax.plan.model_shape import ModelShape
from ultrascale_jax.plan.workload import Run

TABLE = Path(__file__).parents[2] / "docs" / "planning" / "memory_xla.csv"
ROWS = xla_tables.read(TABLE)
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


@pytest.mark.parametrize("held", ["-", "held"])
def test_the_formulas_agree_with_xla(held):
    rows = [xla_tables.with_formula(row) for row in ROWS if row["held"] == held]
    errors = [abs(float(row["error_pct"])) for row in rows]
    assert len(errors) >= 20
    assert median(errors) < 5
    assert max(errors) < 15


def test_the_table_is_complete_and_has_the_formulas_as_they_are():
    hint = f"run: python -m scripts.validation.xla_tables memory_xla --out {TABLE}"
    assert all(row["xla_bytes"] for row in ROWS), hint
    assert [xla_tables.with_formula(row) for row in ROWS] == ROWS, hint


def test_what_rests_between_steps_is_what_xla_takes_as_arguments():
    for row in ROWS:
        run = Run.of(*xla_tables.config(row))
        rests = sum(state(run, weights_of(run)).values())
        assert rests == pytest.approx(int(row["argument_bytes"]), rel=1e-3), row


def test_the_table_is_kept_in_the_order_of_its_runs(tmp_path):
    path, measured = tmp_path / "rows.csv", []
    first = ROWS[0] | dict.fromkeys((*xla_tables.BYTES, "error_pct"), "")
    runs = [first, *ROWS[1:3]]

    def measure(run):
        measured.append(run["model"])
        return ROWS[0] | run | {name: ROWS[0][name] for name in xla_tables.BYTES}

    xla_tables.fill(path, [*reversed(ROWS[:3])], 2, lambda run: run)
    assert xla_tables.fill(path, runs, 3, measure) == ROWS[:3]
    assert measured == [ROWS[0]["model"]]  # the others were there
    assert xla_tables.read(path) == ROWS[:3]
    assert xla_tables.read(tmp_path / "none.csv") == []


@pytest.mark.wide
def test_xla_still_takes_what_the_table_says():
    row = xla_tables.measure(ROWS[7])
    assert int(row["xla_bytes"]) == pytest.approx(int(ROWS[7]["xla_bytes"]), rel=0.02)


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


def test_the_zero_stages_by_hand():
    # Blocks of Llama 3 8B: 218,103,808 parameters a layer in matrices, and two tables of 128,256 x 4,096.
    blocks, table = 32 * 218_103_808, 128_256 * 4096

    def parts(zero: int) -> dict[str, float]:
        return breakdown(run_8b(zero=zero, microbatches=4, remat="full")).parts

    whole = {zero: parts(zero).get("compute parameters", 0) for zero in range(4)}
    sums = {zero: parts(zero)["accumulation buffer"] for zero in range(4)}
    assert whole == {0: 2 * (blocks + 2 * table), 1: whole[0], 2: whole[0], 3: 2 * blocks / 8}
    assert sums[0] == sums[1] == 4 * (blocks + 2 * table)
    assert sums[2] == sums[3] == sums[0] / 8
    assert parts(1)["gradients"] == 2 * blocks + 2 * table
    assert parts(3)["gradients"] == 2 * blocks / 8 + 2 * table


def test_more_shards_and_higher_stages_take_less():
    sizes = [peak({"fsdp": n}) for n in (1, 2, 8, 64, 512)]
    stages = [peak(zero=zero, microbatches=2, remat="full") for zero in (0, 1, 2, 3)]
    policies = [peak(remat=remat) for remat in ("none", "selective", "dots", "full")]
    for series in (sizes, stages, policies):
        assert all(later < earlier for earlier, later in pairwise(series))


def test_twice_the_shards_halve_the_state():
    def rests(fsdp: int) -> float:
        run = run_8b({"fsdp": fsdp})
        weights = weights_of(run)
        return sum(state(run, weights).values()) - 12 * weights.vectors - 3 * 4 * 8192

    assert rests(16) == rests(8) / 2


def test_saving_by_name_lies_between_full_and_selective():
    some = peak(remat=Keep(saved=("q", "k", "v", "attn_core")))
    assert (
        peak(remat="full")
        < some
        < peak(remat=Keep(saved=("q", "k", "v", "attn_core", "gate")))
        < peak(remat="selective")
    )
    assert peak(remat=Keep(saved=("q", "k", "v"), offloaded=("gate", "up"))) < some


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


def test_sequence_parallelism_splits_the_residual_stream_and_tensor_parallelism_does_not():
    tp, sp = (layer_of(run_8b({axis: 8})) for axis in ("tp", "sp"))
    assert sp.residual == tp.residual / 8
    assert (sp.ffn, sp.query, sp.key) == (tp.ffn, tp.query, tp.key)
    assert saved_bytes(run_8b({"sp": 8}, remat="full"), sp)["layer inputs"] == 2 * 4096 * 1024


def test_kv_heads_are_repeated_for_a_larger_tensor_group():
    assert layer_of(run_8b({"sp": 8})).key == layer_of(run_8b({"sp": 16})).key == 8192 * 128
    assert weights_of(run_8b({"sp": 16})).attention == 2 * 4096 * 128 * (32 / 16 + 1)


def test_a_document_mask_is_one_square_of_the_sequence_and_packed_documents_have_none():
    ids, masked = 4 * 8192, KernelsConfig(attention="cudnn")
    assert peak(document_mask=True) - peak() == ids
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
    found = loss_chunks(run_8b(seq_len=seq_len, sequences=sequences))
    assert found == (chunks, seq_len * sequences * 128_256 * 2 / chunks)
    assert num_chunks(seq_len * sequences, 128_256, 2) == chunks


@pytest.mark.parametrize(
    ("schedule", "virtual", "stash", "chunks"),
    [
        ("1f1b", 1, "residuals", 8 + 1),  # 2p in lock step, and the slot of idle ranks
        ("afab", 1, "residuals", 16 + 1),
        ("interleaved", 2, "residuals", 12 + 1),  # 2p + (v-1) p halves
        ("1f1b", 1, "input", 1),  # of the stage whose forward pass is repeated
    ],
)
def test_a_pipeline_keeps_the_layers_of_its_stages_in_flight(schedule, virtual, stash, chunks):
    one = run_8b({"fsdp": 2}, remat="selective")
    run = run_8b(
        {"pp": 4, "fsdp": 2},
        microbatches=16,
        remat="selective",
        schedule=schedule,
        virtual_stages=virtual,
        stash=stash,
    )
    layers = 32 // (4 * virtual)
    for kind in ("attention", "mlp", "norms"):
        name = f"activations: {kind}"
        flat = breakdown(one).parts[name] / 32
        assert breakdown(run).parts[name] == pytest.approx(chunks * layers * flat)
    assert weights_of(run).blocks == weights_of(one).blocks / 4
    assert weights_of(run).tables == weights_of(one).tables / 4


def test_a_stash_of_inputs_is_smaller_and_zero_bubble_larger():
    def peaks(**fields):
        return peak({"pp": 4, "fsdp": 2}, microbatches=16, remat="selective", **fields)

    assert peaks(stash="input") < peaks() < peaks(schedule="zb_uniform")
    assert peaks(schedule="zb_h1") < peaks(schedule="zb_uniform")


def test_padding_takes_memory_like_layers():
    uneven, even = (
        run_8b(
            {"pp": 4, "fsdp": 2},
            microbatches=8,
            shape=ModelShape.of(shapes.LLAMA3_8B, num_layers=n),
        )
        for n in (30, 32)
    )
    assert breakdown(uneven).parts == breakdown(even).parts


def test_experts_are_split_over_ep_and_other_weights_are_not():
    # Mixtral 8x7B: 8 experts of 3 x 4,096 x 14,336, of which a token visits two.
    shape = ModelShape.of(shapes.LLAMA3_8B, experts=Experts(num=8, top_k=2))
    one, four = (
        run_8b(mesh, shape=shape, remat="selective")
        for mesh in ({"fsdp": 4, "ep": 1}, {"fsdp": 4, "ep": 4})
    )
    assert weights_of(one).experts == 32 * 8 * 3 * 4096 * 14336
    assert weights_of(four).experts == weights_of(one).experts / 4
    assert weights_of(four).dense == weights_of(one).dense
    assert sharded_params(four, weights_of(four)) < sharded_params(one, weights_of(one))


def test_what_a_layer_of_experts_keeps_by_hand():
    # One token's two choices of Mixtral: rows as they come, a quarter more than balanced; and by expert, with gate and
    # up, a quarter over the root of 8 ranks more.
    shape = ModelShape.of(shapes.MIXTRAL_8X7B)

    def parts(remat: str) -> dict[str, float]:
        run = run_8b({"ep": 8}, shape=shape, remat=remat)
        return saved_bytes(run, layer_of(run))

    rows, came = 8 * math.ceil((1 + 0.25 / math.sqrt(8)) * 2048), 8 * 1.25 * 8192 / 4
    assert not parts("full")["mlp"] and not parts("full")["dispatch"]
    assert parts("selective")["mlp"] == 2 * 2 * rows * 14336
    assert parts("selective")["dispatch"] == 2 * came * 4096
    assert parts("none")["mlp"] == (6 * 2 + 4) * rows * 14336
    assert parts("none")["dispatch"] == 2 * (came + rows) * 4096
    assert parts(Keep(saved=("gate", "dispatched")))["mlp"] == 2 * rows * 14336
    assert parts(Keep(saved=("gate", "dispatched")))["dispatch"] == 2 * came * 4096
    assert not parts("dots")["mlp"]


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


def test_a_rank_has_room_for_as_many_layers_of_a_kind_as_the_fullest_has():
    shape = ModelShape.of(shapes.DEEPSEEK_V3)
    flat, piped, deeper, two_stages = (
        weights_of(run_8b(mesh, shape=shape, microbatches=32, **pp))
        for mesh, pp in (
            ({"ep": 8}, {}),
            ({"pp": 8, "ep": 8}, {}),
            ({"pp": 16, "ep": 8}, {}),
            ({"pp": 16, "ep": 8}, {"schedule": "interleaved", "virtual_stages": 2}),
        )
    )
    assert piped.layers == 8 and flat.layers == 61
    assert flat.experts == 58 * flat.routed * 3 and piped.experts == 8 * piped.routed * 3
    attention, mlp = shape.attention_params, shape.mlp_params
    whole = 61 * attention + 3 * mlp + 58 * shape.shared_params
    assert flat.dense == pytest.approx(whole)
    assert piped.dense == 8 * (attention + shape.shared_params) + 3 * mlp
    for weights, positions in ((deeper, 2), (two_stages, 1)):
        assert weights.dense == 4 * (attention + shape.shared_params) + positions * mlp
        assert weights.experts == 4 * weights.routed * 3


def test_the_tensor_group_splits_no_router_and_no_latents():
    one, two = (
        weights_of(run_8b({"fsdp": 4, "sp": sp}, shape=ModelShape.of(shapes.DEEPSEEK_V3)))
        for sp in (1, 2)
    )
    whole = 61 * 7168 * (1536 + 512 + 64) + 58 * 7168 * 256
    assert two.dense == pytest.approx(whole + (one.dense - whole) / 2)
    assert two.experts == one.experts / 2


def test_fp8_takes_less_and_float32_more():
    assert peak(precision="fp8") < peak() < peak(precision="fp32")
    assert peak(moment_bytes=6) < peak()


def test_with_few_tokens_the_optimizer_needs_most():
    run = run_8b({"tp": 8}, zero=0, seq_len=128, remat="full")
    parts = breakdown(run).parts
    assert sum(parts.values()) == sum(state(run, weights_of(run)).values()) + parts["gradients"]


def test_the_timeline_starts_with_the_state_and_peaks_twice():
    run = run_8b(microbatches=4, remat="full")
    names, sizes = zip(*timeline(run), strict=True)
    start, accumulators, first, optimizer, second = sizes
    parts = breakdown(run).parts
    assert names[0] == "model init"
    assert start == sum(parts[n] for n in ("master parameters", "optimizer state", "batch"))
    assert accumulators == start + parts["compute parameters"] + parts["accumulation buffer"]
    assert first == second == breakdown(run).peak_bytes > optimizer > start


def test_what_fits_by_formula():
    gpu = find_gpu("h100")
    assert verdict(run_8b(remat="selective"), gpu) == "fits"
    assert verdict(run_8b({"fsdp": 1}, remat="full"), gpu) == "does not fit"


@pytest.mark.parametrize("recipe", ["llama3_8b", "mixtral_8x7b"])
def test_no_jax_is_imported_nor_numpy_without_a_pipeline(recipe):
    code = (
        "import sys; from ultrascale_jax.cli.plan_commands.memory import main; "
        f"main(['{recipe}', '--gpus', '64']); "
        "sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    )
    silent = {"check": False, "stdout": subprocess.DEVNULL}
    assert subprocess.run([sys.executable, "-c", code], **silent).returncode == 0
