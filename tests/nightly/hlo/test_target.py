"""Steps compile for GPUs whose times XLA does not know."""

import pytest

from tests.gpu_programs import FAST
from ultrascale_jax.cli.command_line import load_recipe
from ultrascale_jax.plan.compiled.compile import compile_step


@pytest.mark.parametrize(
    ("gpu", "gpus_per_host"), [("a100", 2), ("gb200", None), ("b300", 4), ("a40", 4)]
)
def test_a_step_compiles_for_gpus_whose_times_xla_does_not_know(gpu, gpus_per_host):
    step = compile_step(load_recipe("debug"), 4, gpu, gpus_per_host=gpus_per_host, options=FAST)
    assert step.axes["fsdp"] == 4
    assert 0 < step.argument_bytes < step.peak_bytes
