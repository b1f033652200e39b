"""Llama-3-8B on 8 H100s with the optimizer's moments in the host's memory."""

import collections
import dataclasses

from tests.gpu_programs import LLAMA3_8B, compile_once
from tests.planned_memory import assert_as_planned
from ultrascale_jax.config import OptimConfig
from ultrascale_jax.hlo.live_buffers import CLASSES, MOMENTS, live_bytes
from ultrascale_jax.hlo.memory_traffic import touched
from ultrascale_jax.plan.formulas.memory import host_bytes

GIB = 2**30


def test_moments_on_the_host_leave_the_device_and_are_copied_beside_the_update():
    fully_sharded, step = (
        compile_once(dataclasses.replace(LLAMA3_8B, optim=OptimConfig(offload=offload)), 8)
        for offload in ("none", "both")
    )
    moved = host_bytes(step.run)
    assert 6 * GIB < moved == step.host_bytes == fully_sharded.argument_bytes - step.argument_bytes
    assert step.peak_bytes <= fully_sharded.peak_bytes - 0.98 * moved
    for program in (fully_sharded, step):
        assert_as_planned(program)
    # Seven matrices of a layer have two moments each. No kernel waits for the host.
    copies = collections.Counter()
    for name, body in step.module.computations.items():
        for i in body:
            if i.opcode in ("fusion", "copy", "fusion-start", "copy-start"):
                copies[i.opcode] += touched(step.module, name, i)[1] > 0
    assert +copies == {"fusion-start": 2 * 2 * 7}
    live = live_bytes(step.memory_plan, step.module)
    assert live[0, CLASSES.index(MOMENTS)] < GIB
