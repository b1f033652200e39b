"""One type says what a step needs and takes, wherever it is from."""

import dataclasses
import json

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


def test_an_estimate_has_the_memory_of_the_breakdown():
    assert STEP.peak_bytes == breakdown(RUN).peak_bytes
    assert STEP.fits == (STEP.peak_bytes <= STEP.gpu.usable_bytes)
    assert not estimate(RUN, find_cluster(None, "h100", 8), peak_bytes=2**40).fits
    rest = STEP.gpu.usable_bytes - STEP.peak_bytes
    fits = [dataclasses.replace(STEP, workspace_bytes=rest + more).fits for more in (0, 1)]
    assert fits == [True, False]


def test_speed_follows_from_the_step():
    assert STEP.tokens_per_s_gpu == pytest.approx(2 * 4096 / STEP.step_s)
    slow = STEP.scaled(2.0)
    assert slow.step_s == 2 * STEP.step_s == pytest.approx(sum(slow.parts.values()))
    assert slow.mfu == pytest.approx(STEP.mfu / 2)
    assert slow.peak_bytes == STEP.peak_bytes


def test_the_summary_is_json():
    found = json.loads(json.dumps(STEP.summary()))
    assert (found["label"], found["gpus"], found["gpu"]) == (RUN.label, 8, "h100")
    assert found["time_s"] == dict(STEP.parts) and found["mfu"] == STEP.mfu
    assert found["peak_bytes"] == STEP.peak_bytes and found["source"] == "formula"
