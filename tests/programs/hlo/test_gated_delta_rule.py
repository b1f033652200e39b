"""The H100 program of the gated delta rule: ranks of cp exchange states, not tokens, and blocks bound the memory."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from tests.gpu_programs import FAST, NO_MACHINE_CODE
from ultrascale_jax.config import ContextConfig
from ultrascale_jax.hlo import collectives
from ultrascale_jax.kernels.residuals import ATTENTION_RESIDUAL
from ultrascale_jax.parallel.gated_delta_rule import BLOCK, DIMS, gated_delta_rule
from ultrascale_jax.plan.compiled.compile import CompiledProgram, compile_program, target_devices
from ultrascale_jax.sharding.rules import act

B, K, N, H, W = 2, 2, 4, 128, 128
CHUNK = 32
RANKS, TENSOR = 4, 2
ZIGZAG = ContextConfig(strategy="zigzag")
KEEP = jax.checkpoint_policies.save_only_these_names(ATTENTION_RESIDUAL)


def both_passes(tokens: int) -> CompiledProgram:
    """Output and gradients on H100s, under a remat policy that keeps attention's residuals."""
    devices = np.array(target_devices(RANKS * TENSOR)).reshape(RANKS, TENSOR)
    mesh = Mesh(devices, ("cp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    shapes = [(B, tokens, *rest) for rest in ((K, H), (K, H), (N, W), (N,), (N,), (), (N, W))]
    dtypes = [jnp.bfloat16] * 3 + [jnp.float32] * 2 + [jnp.int32, jnp.bfloat16]

    def run(arrays, ids, d_out):
        @functools.partial(jax.checkpoint, policy=KEEP)
        def rule(q, k, *others):  # norms that the policy does not keep
            q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
            return gated_delta_rule(q, k, *others, ids, context=ZIGZAG, chunk=CHUNK)

        out, pull_back = jax.vjp(rule, *arrays)
        return out, pull_back(d_out)

    with jax.set_mesh(mesh):
        *arrays, ids, d_out = (
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, act(dims)))
            for shape, dtype, dims in zip(shapes, dtypes, (*DIMS, "BT", "BTNW"), strict=True)
        )
        flags = {**FAST, **NO_MACHINE_CODE}
        return compile_program(
            jax.jit(run), arrays, ids, d_out, mesh=mesh, estimates=False, options=flags
        )


def test_ranks_gather_states_once_a_pass_and_nothing_holds_the_states_of_all_chunks():
    blocks = 8
    program = both_passes(RANKS * blocks * BLOCK)
    found = collectives.find_collectives(program.module, program.axes)
    assert {(c.kind, c.axes, c.loops) for c in found} == {("all-gather", ("cp",), ())}
    pieces, heads = 2, N // TENSOR
    matrix_and_state, first_and_last_documents = heads * H * (H + W) * 4, 2 * 4
    sent = pieces * B * (matrix_and_state + first_and_last_documents)
    assert [c.operand_bytes for c in found] == [sent] * 2

    chunk_states = blocks * BLOCK // CHUNK * B * heads * H * W
    computations = program.module.computations.values()
    arrays = [array for c in computations for instruction in c for array in instruction.arrays]
    workspace = "s8"  # of cuBLAS
    sizes = [math.prod(array.dims) for array in arrays if array.dtype != workspace]
    assert max(sizes) < chunk_states
