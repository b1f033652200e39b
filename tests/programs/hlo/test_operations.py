"""A compiled step does the operations that the model needs, and its simulated times add up."""

import math

import pytest

from tests.gpu_programs import compiled
from ultrascale_jax.plan.compiled.op_costs import Operations
from ultrascale_jax.plan.compiled.timeline import simulate
from ultrascale_jax.plan.flops import attention_flops_per_token
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.model_shape import ModelShape


def test_a_compiled_step_does_the_operations_that_the_model_needs():
    cfg, step = compiled(2, {"fsdp": 2}, zero=3, remat="selective", global_batch=4)
    operations = Operations(step.module, step.gpu)
    flops = {"gemm": 0.0, "attention": 0.0, "other": 0.0}
    # A loop of unknown length is that of `models/loss.py`, which runs where a target is far below the highest logit.
    for name, loops in step.module.walk():
        for instruction in step.module.computations[name] if None not in loops else ():
            if instruction.opcode not in ("while", "call", "conditional"):
                operation = operations.find(name, instruction)
                if operation is not None:
                    flops[operation.kind] += operation.flops * math.prod(loops)
    tokens = cfg.train.global_batch * cfg.data.seq_len / 2
    assert flops["gemm"] == pytest.approx(6 * ModelShape.of(cfg.model).active_params * tokens)
    # Backward runs the first of the forward pass's two products again.
    needed = attention_flops_per_token(cfg.model, cfg.data.seq_len) * tokens
    assert flops["attention"] == pytest.approx(needed * 7 / 6)

    timeline = simulate(step.module, step.axes, find_cluster(None, "h100", 2))
    assert timeline.link_s.keys() >= {("all-gather", "fsdp"), ("reduce-scatter", "fsdp")}
    assert sum(timeline.busy_s.values()) + timeline.idle_s == pytest.approx(timeline.step_s)
    assert sum(timeline.waited_s.values()) == pytest.approx(timeline.idle_s)
    assert sum(timeline.work_s.values()) == pytest.approx(sum(timeline.busy_s.values()))
    assert {block for kind, block in timeline.work_s if kind == "attention"} == {"attention"}
    products = {block for kind, block in timeline.work_s if kind == "gemm"}
    assert products == {"attention", "mlp", "loss"}
