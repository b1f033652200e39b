"""The H100 program of a pipeline: sends in flight, one gradient reduction a step, memory and size as the table says."""

import dataclasses

import pytest

from ultrascale_jax.config import GPU_MEMORY_SHARE, Experts, MeshConfig
from ultrascale_jax.configs import llama3_405b
from ultrascale_jax.hlo.classes import block_of
from ultrascale_jax.parallel.experts.capacity import DENSE_OR_SHARED
from ultrascale_jax.parallel.pipeline.program import assemble
from ultrascale_jax.parallel.pipeline.schedules import of_config
from ultrascale_jax.plan.formulas.pipeline import shares
from ultrascale_jax.plan.hardware import find_gpu

BF16, MIB = 2, 2**20
MESH = {"pp": 2, "fsdp": 2, "sp": 2}


@pytest.fixture(scope="session")
def piped(compiled):
    """`piped(microbatches, zero, **pp)`: a small model on pp 2 x fsdp 2 x sp 2, one sequence a micro-batch."""

    def compile_run(microbatches, zero=1, **pp):
        batch = {"microbatches": microbatches, "global_batch": 2 * microbatches}
        return compiled(8, MESH, pp, zero=zero, **batch)

    return compile_run


def sends(step):
    return [c for c in step.collectives if c.kind == "collective-permute"]


def steady_sends(table, step):
    """Select the sends of the loop whose ticks run forward and backward."""
    both = sum({"F", "B"} <= {k for cell in row for k in cell} for row in table.ticks)
    return [c for c in sends(step) if c.loops == (both,)]


def activation(cfg) -> int:
    """Bytes of the residual stream of one micro-batch on a GPU."""
    rows = cfg.train.global_batch // cfg.train.microbatches // cfg.mesh.batch
    return rows * cfg.data.seq_len // cfg.mesh.sp * cfg.model.d_model * BF16


@pytest.mark.slow
def test_a_tick_sends_one_activation_and_one_gradient(piped):
    cfg, step = piped(8)
    table = of_config(cfg)
    assert {c.operand_bytes for c in sends(step)} == {activation(cfg)}
    assert {c.axes for c in sends(step)} == {("pp",)}
    ticks = [{kind for cell in row for kind in cell} for row in table.ticks]
    assert sum(c.times for c in sends(step)) == sum(len(kinds) for kinds in ticks)


@pytest.mark.slow
def test_the_steady_state_waits_for_no_send(piped):
    cfg, step = piped(8)
    steady = steady_sends(of_config(cfg), step)
    assert len(steady) == 2
    assert all(c.asynchronous and c.hidden_by for c in steady)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_gradients_are_reduced_once_a_step_or_scattered_layer_by_layer(piped, zero):
    """Nothing as large as a weight is summed over fsdp inside the loops with ZeRO-1; with ZeRO-2 each layer's is."""
    cfg, step = piped(8, zero=zero)
    weight = cfg.model.d_model * cfg.model.d_ff // cfg.mesh.tensor
    summed = [
        c
        for c in step.collectives
        if c.kind in ("reduce-scatter", "all-reduce") and "fsdp" in c.axes
        if c.operand_bytes >= weight * BF16
    ]
    assert {bool(c.loops) for c in summed} == ({False} if zero == 1 else {True})
    assert {c.kind for c in summed} == {"reduce-scatter"}


@pytest.mark.slow
def test_gradients_are_added_in_place_and_no_buffer_is_copied(piped):
    """No loop cuts a float32 row out of the sums of gradients, or copies the buffer of what layers keep."""
    cfg, step = piped(8)
    m, tensor = cfg.model, cfg.mesh.tensor
    rows = {(1, m.d_model, m.d_ff // tensor), (1, m.d_ff // tensor, m.d_model)}
    inside = [name for name, trips in step.module.walk() if trips]
    made = [i for name in inside for i in step.module.computations[name]]
    assert not [i for i in made for a in i.arrays if a.dtype == "f32" and tuple(a.dims) in rows]
    stage = m.num_layers // cfg.mesh.pp * activation(cfg)
    copied = [i for i in made if i.opcode in ("copy", "copy-start")]
    assert all(a.bytes < stage for i in copied for a in i.arrays)


@pytest.mark.slow
def test_one_loop_holds_forward_and_backward_so_that_they_overlap(piped):
    cfg, step = piped(8)
    depth = cfg.model.num_layers // cfg.mesh.pp
    flash = {}
    for matmul in step.matmuls:
        if matmul.attention:
            flash[matmul.computation] = flash.get(matmul.computation, 0) + 1
    bodies = dict(step.module.walk())
    # remat=full: attention runs in the forward layer, again in the backward layer, and backward.
    assert 3 in {count for name, count in flash.items() if bodies[name][-1:] == (depth,)}


# Implied by parallel/test_pipeline_program.py: slots of a schedule do not grow with its micro-batches.
@pytest.mark.wide
@pytest.mark.slow
def test_memory_of_1f1b_is_flat_in_micro_batches(piped):
    few, many = (piped(m)[1].temporary_bytes for m in (8, 32))
    assert abs(many - few) < MIB


@pytest.mark.wide
def test_memory_of_afab_grows_with_micro_batches(piped):
    cfg, few = piped(8, schedule="afab")
    # remat=full keeps the input of each layer, and the gradient of the last stage's output waits.
    slope = cfg.model.num_layers // cfg.mesh.pp * activation(cfg) + activation(cfg)
    grown = piped(32, schedule="afab")[1].temporary_bytes - few.temporary_bytes
    assert grown == pytest.approx(24 * slope, rel=0.1)


# Implied by parallel/test_pipeline.py: one scan over the ticks, whose count is data.
@pytest.mark.wide
@pytest.mark.slow
def test_the_program_does_not_grow_with_micro_batches(piped):
    few, many = (piped(m)[1] for m in (8, 32))
    sizes = [
        len([line for line in step.text.splitlines() if " = " in line]) for step in (few, many)
    ]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)


# parallel/test_pipeline_program.py has the slots of the queue, one for each weight gradient that waits.
@pytest.mark.wide
def test_zero_bubble_keeps_no_more_than_1f1b_and_its_queue(piped):
    _, plain = piped(8)
    cfg, split = piped(8, schedule="zb_uniform")
    program = assemble(of_config(cfg))
    m, mesh = cfg.model, cfg.mesh
    # A layer's queue: at most four residual streams, q, k, v, the attention's output, and three of the ffn's width.
    heads = (2 * m.num_heads + 2 * m.num_kv_heads) * m.head_dim // mesh.tensor
    width = 4 * m.d_model // mesh.sp + heads + 3 * m.d_ff // mesh.tensor
    entry = cfg.data.seq_len * width * BF16 * m.num_layers // mesh.pp
    queue = (program.slots.weights + 1) * entry
    assert split.temporary_bytes - plain.temporary_bytes < queue + 8 * MIB


@pytest.mark.slow
def test_tokens_travel_outside_of_the_conditional_where_layers_of_both_kinds_are_in_a_stage(
    compiled,
):
    experts = Experts(num=8, top_k=2, d_ff=512, shared=1, dense_layers=1)
    batch = {"microbatches": 4, "global_batch": 16, "zero": 1, "remat": "full"}
    mesh = {"pp": 2, "fsdp": 2, "ep": 2}
    # With room for every token there are no further rounds, which are the same program again in a loop.
    moe = {"capacity_factor": 8.0}
    cfg, step = compiled(8, mesh, {}, experts=experts, moe=moe, **batch)
    computations, module = step.module.computations, step.module
    conditionals = [i for body in computations.values() for i in body if i.opcode == "conditional"]
    conditionals = [i for i in conditionals if block_of(module, i) == "moe"]
    branches = {name for i in conditionals for name in i.called}
    assert branches and not branches & {c.computation for c in step.collectives}
    # In lock step all ranks wait for the experts, which have wider products than the dense layer of another rank.
    assert cfg.model.d_ff <= (experts.top_k + experts.shared) * cfg.model.expert_d_ff
    share = shares(step.run, module)
    expected = [float(DENSE_OR_SHARED not in i.op_name) for i in conditionals]
    assert [share(i, (4,)) for i in conditionals] == expected and set(expected) == {0.0, 1.0}


# That nothing waits is proved on a small pipeline above; that it fits is planned in seconds (plan/test_memory.py).
@pytest.mark.wide
def test_a_large_model_fits_and_its_steady_state_waits_for_no_send(compile_once):
    """Llama 3.1 405B on 1,024 GPUs."""
    cfg, mesh, num_devices = llama3_405b.config, MeshConfig(pp=16, fsdp=8, sp=8), 1024
    batch = {"microbatches": 64, "global_batch": mesh.batch * 64}
    train = dataclasses.replace(cfg.train, zero=1, remat="full", **batch)
    cfg = dataclasses.replace(cfg, mesh=mesh, train=train).check(num_devices)
    step = compile_once(cfg, num_devices)
    assert step.peak_bytes <= GPU_MEMORY_SHARE * find_gpu("h100").memory_gib * 2**30
    steady = steady_sends(of_config(cfg), step)
    assert len(steady) == 2
    assert all(c.asynchronous and c.hidden_by for c in steady)
