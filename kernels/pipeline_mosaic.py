"""Share the loop of matrix-product kernels on Hopper GPUs: one program on each SM takes every n-th tile.

Two of its warpgroups multiply, a third one loads ahead by TMA.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


class Tile(NamedTuple):
    """The work of a program on one tile of the result: a loop over blocks of the contracted dim."""

    operands: Sequence[Any]
    """In global memory."""
    specs: Sequence[Any]
    """Where the operands' blocks are."""
    steps: Any
    """Blocks of the contracted dim."""
    step: Callable
    """`step(index, *blocks, state)` returns the next state; with `waits` a barrier for each block comes before it."""
    wrapper: Callable
    """`wrapper(run)` makes the first state, calls `run(state)`, and uses the last state."""


def for_each_tile(
    grid: tuple,
    tile_at: Callable[[Any, Any], Tile],
    operands: Sequence[Any],
    specs: Sequence[Any],
    out_s: Any,
    *,
    chained: bool = False,
    waits: bool = False,
) -> None:
    """Multiply this program's tiles, `tile_at(loop, out_s)` for each `loop.index` of `grid`.

    Args:
      operands, specs: like every tile's, for the buffers.
      out_s: allocation in shared memory, for results on their way to global memory.
      chained: the next tile's blocks are loaded while this one's results are stored; every tile has as many steps, a
        multiple of `STAGES`, and `grid` is known when it is compiled.
      waits: the step waits for its blocks itself.
    """
    pipeline = functools.partial(_pipeline, manual_produced_barriers=waits)

    def visit(loop, buffers, out_s):
        tile, states = tile_at(loop, out_s), plgpu.PipelinePipeline
        # The loads of the first tile fill the stages, and later tiles' loads wait for them.
        state = jnp.where(loop.local_index == 0, states.START, states.STEADY) if chained else None
        run = pipeline(tile.step, tile.steps, tile.specs, tile.wrapper, pipeline_state=state)
        run(*tile.operands, allocations=buffers)

    buffers = pipeline(None, STAGES, specs, lambda run: None).get_allocations(*operands)

    @functools.partial(pl.run_scoped, buffers=buffers, out_s=out_s, collective_axes="wg")
    def _(buffers, out_s):
        plgpu.nd_loop(grid, collective_axes="program")(lambda loop: visit(loop, buffers, out_s))
        if chained:
            _quiesce(buffers, math.prod(grid))

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _pipeline(step: Any, steps: Any, specs: Sequence[Any], wrapper: Callable, **options) -> Any:
    """Return the loop of one tile; its arguments as `Tile` has them."""
    return plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(steps,),
        in_specs=specs,
        compute_context=wrapper,
        memory_registers=40,
        wg_axis="wg",
        num_compute_wgs=WARPGROUPS,
        max_concurrent_steps=STAGES,
        **options,
    )


def _quiesce(buffers: Any, tiles: int) -> None:
    """Wait until the last loaded blocks have been used; the pipeline's own end of a chain needs two tiles at least."""
    loads = (lax.axis_index("wg") == WARPGROUPS) & (lax.axis_index("program") < tiles)

    @pl.when(loads)
    def _():
        [used] = buffers["flat_consumed_barrier_refs"]
        for stage in range(STAGES):
            plgpu.barrier_wait(used.at[stage])


def with_accumulator(shape: tuple[int, int], finish: Callable[[jax.Array], None]) -> Callable:
    """Return the `wrapper` of a tile whose state is an accumulator, of which `finish` gets the sum."""

    def wrapper(run):
        def accumulate(acc):
            run(acc)
            finish(acc[...])

        pl.run_scoped(accumulate, plgpu.ACC(shape, jnp.float32))

    return wrapper


def store(columns: int, values_at: Callable[[int], jax.Array], out_s: Any, copy: Callable) -> None:
    """Write a warpgroup's result, the width of `out_s` at a time: `values_at(column)` there, and `copy(column)` on."""
    for column in range(0, columns, out_s.shape[1]):
        values = values_at(column).astype(out_s.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_s[...] = values
        plgpu.commit_smem()
        copy(column)
