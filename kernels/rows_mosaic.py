"""Share the loop of kernels on Hopper GPUs that work part by part: each warpgroup takes every n-th part.

One program runs on each SM. Its warpgroups do not wait for each other; TMA loads their next parts meanwhile.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ultrascale_jax.kernels.device import cores

LANES = 128
"""Threads of a warpgroup."""


def for_each_part(
    total: int,
    warpgroups: int,
    load: Callable,
    step: Callable,
    loaded: Any,
    depth: int,
    state: Any = (),
) -> Any:
    """Run this warpgroup's steps on its parts, of `total`, while the next `depth` load; return the last state.

    Args:
      load: `load(part, slot, barrier)` starts the copies of a part into a slot.
      step: `step(part, slot, state)` returns the next state. It may write to the slot too; copies from there that it
        started are done when it returns.
      loaded: `depth` barriers for each warpgroup.
    """
    wg, stride = lax.axis_index("wg"), cores() * warpgroups
    first = lax.axis_index("program") * warpgroups + wg
    count = lax.div(total - first + stride - 1, stride)

    def fetch(n):
        slot = lax.rem(n, depth)
        pl.when(n < count)(lambda: load(first + n * stride, slot, loaded.at[wg * depth + slot]))

    for n in range(depth):
        fetch(jnp.int32(n))

    def run(n, state):
        slot = lax.rem(n, depth)
        plgpu.barrier_wait(loaded.at[wg * depth + slot])
        state = step(first + n * stride, slot, state)
        # The next load here comes after all reads and writes.
        plgpu.commit_smem()
        fetch(n + depth)
        return state

    return lax.fori_loop(0, count, run, state)
