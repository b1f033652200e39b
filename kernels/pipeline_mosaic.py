"""Share the loop of matrix-product kernels on Hopper GPUs: one program on each SM takes every n-th tile.

Two of its warpgroups multiply, a third one loads ahead by TMA.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ultrascale_jax.kernels.device import cores, match_vma

STAGES = 4
"""Steps loaded ahead; with the buffers of the results they nearly fill shared memory (227 KiB)."""

WARPGROUPS = 2
"""Warpgroups that multiply."""

STRIP = 16
"""Rows of tiles whose columns are consecutive, so that concurrent tiles share operands in the L2 cache."""


def launch(
    body: Callable,
    name: str,
    out: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[jax.Array],
    *,
    warpgroups: int = WARPGROUPS + 1,
    memory: Any = (),
    approx_math: bool = True,
) -> list[jax.Array]:
    """Run the kernel `name` on each SM; its results, shaped as `out`, vary over the mesh axes of its operands.

    Args:
      body: gets operands and results in global memory, and `memory`; its axes are `program` and `wg`.
      memory: allocations in shared memory.
      approx_math: exp and log are the GPU's instructions, two of which are off by a few units in float32's last place.
    """
    results = plgpu.kernel(
        body,
        out_type=list(out),
        grid=(cores(),),
        grid_names=("program",),
        num_threads=warpgroups,
        thread_name="wg",
        scratch_types=memory,
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=approx_math),
    )(*operands)
    return match_vma(*results, *operands)[: len(out)]


def pipeline(
    step: Any,
    steps: Any,
    specs: list,
    around: Callable = lambda run: None,
    tile: Any = None,
    *,
    waits: bool = False,
) -> Any:
    """Run `step` over the blocks of one tile; `around` gets a function that runs it from the first state.

    Where the stages divide the steps, the next tile's blocks are loaded while this one's results are stored: the loads
    of `tile` 0, this program's first, fill the stages, those of later ones wait for them, and `quiesce` ends it.

    Args:
      step: gets index, blocks, with `waits` a barrier for each, and the state; returns the next state. None for a
        pipeline of which only the buffers are wanted.
      steps: blocks of the contracted dim; a number known when it is compiled, if there is a `tile`.
      specs: where the operands' blocks are.
      around: makes the state, runs, and uses the last state.
      tile: how many tiles this program has had.
      waits: whether the step waits for its blocks itself.
    """
    states = plgpu.PipelinePipeline
    chained = tile is not None and steps % STAGES == 0
    return plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(steps,),
        memory_registers=40,
        in_specs=specs,
        wg_axis="wg",
        num_compute_wgs=WARPGROUPS,
        max_concurrent_steps=STAGES,
        manual_produced_barriers=waits,
        compute_context=around,
        pipeline_state=jnp.where(tile == 0, states.START, states.STEADY) if chained else None,
    )


def visit_tiles(
    grid: tuple, visit: Callable, buffers: Any, out_s: Any, end: Callable = lambda buffers: None
) -> None:
    """Call `visit(loop, buffers, out_s)` for this program's tiles `loop.index` of `grid`, and then `end(buffers)`.

    Args:
      buffers: allocations of its pipeline, in shared memory.
      out_s: shared memory for results on their way to global memory.
    """

    @functools.partial(pl.run_scoped, buffers=buffers, out_s=out_s, collective_axes="wg")
    def _(buffers, out_s):
        plgpu.nd_loop(grid, collective_axes="program")(lambda loop: visit(loop, buffers, out_s))
        end(buffers)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def quiesce(buffers: Any, steps: int, tiles: int) -> None:
    """Wait until the last loaded blocks have been used; the pipeline's own end of a chain needs two tiles at least."""
    if steps % STAGES:
        return
    loads = (lax.axis_index("wg") == WARPGROUPS) & (lax.axis_index("program") < tiles)

    @pl.when(loads)
    def _():
        [used] = buffers["flat_consumed_barrier_refs"]
        for stage in range(STAGES):
            plgpu.barrier_wait(used.at[stage])
