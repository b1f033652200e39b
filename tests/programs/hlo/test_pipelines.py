"""The H100 program of a pipeline: sends in flight, one gradient reduction a step, memory and size as the table says."""

from tests.gpu_programs import compiled, sends, steady_sends
from ultrascale_jax.parallel.pipeline.schedules import of_config

BF16 = 2
MESH = {"pp": 2, "fsdp": 2, "sp": 2}


def piped():
    """A small model on pp 2 x fsdp 2 x sp 2, with 8 micro-batches of one sequence, and its step."""
    return compiled(8, MESH, zero=1, microbatches=8, global_batch=16)


def activation(cfg) -> int:
    """Bytes of the residual stream of one micro-batch on a GPU."""
    rows = cfg.train.global_batch // cfg.train.microbatches // cfg.mesh.batch
    return rows * cfg.data.seq_len // cfg.mesh.sp * cfg.model.d_model * BF16


def test_a_tick_sends_one_activation_and_one_gradient():
    cfg, step = piped()
    table = of_config(cfg)
    assert {c.operand_bytes for c in sends(step)} == {activation(cfg)}
    assert {c.axes for c in sends(step)} == {("pp",)}
    ticks = [{kind for cell in row for kind in cell} for row in table.ticks]
    assert sum(c.times for c in sends(step)) == sum(len(kinds) for kinds in ticks)


def test_the_steady_state_waits_for_no_send():
    cfg, step = piped()
    steady = steady_sends(of_config(cfg), step)
    assert len(steady) == 2
    assert all(c.asynchronous and c.hidden_by for c in steady)


def test_gradients_are_reduced_once_a_step():
    """Nothing as large as a weight is summed over fsdp inside the loops with ZeRO-1."""
    cfg, step = piped()
    weight = cfg.model.d_model * cfg.model.d_ff // cfg.mesh.tensor
    kinds = ("reduce-scatter", "all-reduce")
    over_fsdp = [c for c in step.collectives if c.kind in kinds and "fsdp" in c.axes]
    summed = [c for c in over_fsdp if c.operand_bytes >= weight * BF16]
    assert {(bool(c.loops), c.kind) for c in summed} == {(False, "reduce-scatter")}


def test_gradients_are_added_in_place_and_no_buffer_is_copied():
    """No loop cuts a float32 row out of the sums of gradients, or copies the buffer of what layers keep."""
    cfg, step = piped()
    m, tensor = cfg.model, cfg.mesh.tensor
    rows = {(1, m.d_model, m.d_ff // tensor), (1, m.d_ff // tensor, m.d_model)}
    inside = [name for name, trips in step.module.walk() if trips]
    made = [i for name in inside for i in step.module.computations[name]]
    assert not [i for i in made for a in i.arrays if a.dtype == "f32" and tuple(a.dims) in rows]
    stage = m.num_layers // cfg.mesh.pp * activation(cfg)
    copied = [i for i in made if i.opcode in ("copy", "copy-start")]
    assert all(a.bytes < stage for i in copied for a in i.arrays)


def test_one_loop_holds_forward_and_backward_so_that_they_overlap():
    cfg, step = piped()
    depth = cfg.model.num_layers // cfg.mesh.pp
    flash = {}
    for matmul in step.matmuls:
        if matmul.attention:
            flash[matmul.computation] = flash.get(matmul.computation, 0) + 1
    bodies = dict(step.module.walk())
    # remat=full: attention runs in the forward layer, again in the backward layer, and backward.
    assert 3 in {count for name, count in flash.items() if bodies[name][-1:] == (depth,)}
