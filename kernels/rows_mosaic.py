"""Share the loop of kernels on Hopper GPUs that work part by part: each warpgroup takes the next part of its own.

One program runs on each SM. Its warpgroups do not wait for each other; TMA loads their next parts meanwhile.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LANES = 128
"""Threads of a warpgroup."""


def share(total: int, warpgroups: int, programs: int) -> tuple[Callable, jax.Array]:
    """Return the function from n to the item, of `total`, that is this warpgroup's n-th, and how many it has."""
    first = lax.axis_index("program") * warpgroups + lax.axis_index("wg")
    stride = programs * warpgroups
    return lambda n: first + n * stride, lax.div(total - first + stride - 1, stride)


def loaded_ahead(
    step: Callable, count: jax.Array, load: Callable, loaded: Any, depth: int, state: Any = ()
) -> Any:
    """Run `step(n, slot, state)` for each n below count while the next `depth` load; return the last state.

    `load(n, slot, barrier)` starts the copies of n into the slot; `loaded` has `depth` barriers for each warpgroup. A
    step may write to the slot too; what it started to copy from there is copied when it returns.
    """

    def barrier_of(slot):
        return loaded.at[lax.axis_index("wg") * depth + slot]

    def fetch(n):
        slot = lax.rem(n, depth)
        pl.when(n < count)(lambda: load(n, slot, barrier_of(slot)))

    for n in range(depth):
        fetch(jnp.int32(n))

    def one(n, state):
        slot = lax.rem(n, depth)
        plgpu.barrier_wait(barrier_of(slot))
        state = step(n, slot, state)
        # The next load here comes after all reads and writes.
        plgpu.commit_smem()
        fetch(n + depth)
        return state

    return lax.fori_loop(0, count, one, state)
