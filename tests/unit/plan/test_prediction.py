"""One type says what a step needs and takes, wherever it is from."""

import dataclasses

import pytest

from ultrascale_jax.config import MeshConfig
from ultrascale_jax.configs.shapes import LLAMA3_8B
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.model_shape import ModelShape
from ultrascale_jax.plan.workload import Run

RUN = Run(
    shape=ModelShape.of(LLAMA3_8B),
    mesh=MeshConfig(fsdp=8),
    seq_len=4096,
    sequences=2,
    remat="full",
)
STEP = estimate(RUN, find_cluster(None, "h100", 8))


def test_a_program_fits_or_not_and_a_formula_may_be_unsure():
    usable = STEP.gpu.usable_bytes
    judged = [
        dataclasses.replace(STEP, peak_bytes=int(usable * x)) for x in (0.9, 0.92, 1.05, 1.07)
    ]
    assert [s.verdict for s in judged] == ["fits", "unsure", "unsure", "does not fit"]
    program = dataclasses.replace(STEP, source="compiled", peak_bytes=usable - 12, gap_bytes=2)
    found = [dataclasses.replace(program, workspace_bytes=n).verdict for n in (10, 11)]
    assert found == ["fits", "does not fit"]
    host = dataclasses.replace(STEP, host_bytes=STEP.gpu.usable_host_bytes + 1)
    assert host.verdict == "does not fit"


def test_speed_follows_from_the_step():
    assert breakdown(RUN).peak_bytes == STEP.peak_bytes
    assert STEP.tokens_per_s_gpu == pytest.approx(2 * 4096 / STEP.step_s)
    assert STEP.mfu == pytest.approx(RUN.step_flops / 8 / STEP.step_s / 989.4e12)
    slow = STEP.scaled(2.0)
    assert slow.step_s == 2 * STEP.step_s == pytest.approx(sum(slow.parts.values()))
    assert slow.mfu == pytest.approx(STEP.mfu / 2)
    assert slow.peak_bytes == STEP.peak_bytes
