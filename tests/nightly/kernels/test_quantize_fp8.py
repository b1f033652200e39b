"""The quantisation to fp8, compiled for H100s: one kernel that keeps all in registers."""

import functools

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tests.gpu_kernels import compile_for
from ultrascale_jax.kernels.quantize_fp8 import quantize_fp8, quantize_fp8_both


@pytest.mark.parametrize(
    ("quantize", "scaling"), [(quantize_fp8_both, "block"), (quantize_fp8, "tile")]
)
def test_h100s_run_one_kernel_that_keeps_all_in_registers(h100s, in_registers, quantize, scaling):
    M, K = 8192, 4096
    run = functools.partial(quantize, scaling=scaling, implementation="mosaic")
    program = compile_for(h100s, run, [((8 * M, K), jnp.bfloat16)], (P("dp"),), P("dp"))
    assert len(in_registers(program)) == 1
    # Scales at most.
    assert program.memory_analysis().temp_size_in_bytes < M * K / 16
