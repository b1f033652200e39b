"""Llama-3-8B on 8 H100s: the GPUs never wait for a collective that something could hide, and buffers are theory's."""

import re

import pytest

from tests.gpu_programs import FAST, compile_once
from tests.gpu_programs import LLAMA3_8B as RUN
from ultrascale_jax.hlo.live_buffers import CLASSES, live_bytes


@pytest.fixture(scope="module")
def fully_sharded():
    return compile_once(RUN, 8, tuple(FAST.items()))


def test_fully_sharded_waits_for_no_collective(fully_sharded):
    waits = [c for c in fully_sharded.collectives if not c.asynchronous]
    # Once a step: the first layer, with the head in the same gather (`one_gather`), which nothing could hide.
    assert [(c.kind, c.loops) for c in waits] == [("all-gather", ())]
    # The gradients of the norms are summed in one all-reduce, with the loss and the squares of nine matrices' gradients
    # and first moments.
    norms = 4 * (2 * RUN.model.num_layers + 1) * RUN.model.d_model
    sums = [c.operand_bytes for c in fully_sharded.collectives if c.kind == "all-reduce"]
    assert norms <= max(sums) <= norms + 4 * (2 * 9 + 1)
    assert sum(sums) <= norms + 128


def test_fully_sharded_gathers_run_beside_matmuls(fully_sharded):
    gathers = [c for c in fully_sharded.collectives if c.kind == "all-gather" and c.loops]
    hidden = sum(c.result_bytes for c in gathers if c.hidden_by_heavy)
    assert hidden >= 0.8 * sum(c.result_bytes for c in gathers)


def test_fully_sharded_sets_no_activations_to_zero_and_gathers_no_embedding(fully_sharded):
    m, tokens = RUN.model, RUN.train.global_batch // 8 * RUN.data.seq_len
    stack = rf"bf16\[{m.num_layers},{RUN.train.global_batch // 8},{RUN.data.seq_len},{m.d_model}\]"
    assert re.search(
        rf"{stack}\S* custom-call\(\), custom_call_target=\"AllocateBuffer", fully_sharded.text
    )
    assert not re.search(rf"{stack}\S* (broadcast|copy)\(", fully_sharded.text)
    # Token ids travel, the looked-up tokens and their gradients; the one table that is gathered is the head.
    embedding = [c for c in fully_sharded.collectives if "embedding" in c.op_name]
    moved = [c.operand_bytes for c in embedding if c.kind == "all-to-all"]
    assert moved == [2 * tokens * m.d_model] * 2
    table = 2 * m.vocab_size * m.d_model
    gathers = [c for c in fully_sharded.collectives if c.kind == "all-gather" and not c.loops]
    assert sum(a.bytes == table // 8 for c in gathers for a in c.operands) == 1


def test_buffers_along_the_step_are_those_of_theory_and_their_peak_is_xlas(fully_sharded):
    plan, run, module = fully_sharded.memory_plan, fully_sharded.run, fully_sharded.module
    live = live_bytes(plan, module)
    # Without a few constants.
    assert 0 <= fully_sharded.peak_bytes - live.sum(axis=1).max() < 4096
    held = dict(zip(CLASSES, live.T, strict=True))
    shard = 4 * run.shape.num_params / 8  # float32; norms are whole
    assert held["master parameters"].min() == pytest.approx(shard, rel=1e-3)
    assert held["optimizer state"].min() == pytest.approx(2 * shard, rel=1e-3)
    scopes = {m.name: module.by_name[m.computation][m.name].op_name for m in fully_sharded.matmuls}
    # At the last product, in the type of compute: shards of the layers' and of the head's; whole those of the head,
    # which travels, and of a layer; and that of the residual stream.
    table = RUN.model.vocab_size * RUN.model.d_model
    layers = run.shape.num_params - 2 * table
    stream = 2 * RUN.data.seq_len * RUN.model.d_model
    made = (layers + table) / 8 + table + layers / RUN.model.num_layers + stream
    last = max(plan.positions[name] for name in scopes)
    assert held["gradients"][last] == pytest.approx(2 * made, rel=0.02)
    # When the loss begins, of each layer its input: bfloat16 [2, 8192, D].
    inputs = RUN.model.num_layers * 2 * (2 * RUN.data.seq_len * RUN.model.d_model)
    loss = min(plan.positions[name] for name, scope in scopes.items() if "jvp(loss)" in scope)
    assert inputs <= held["activations: kept"][loss] <= 1.1 * inputs
