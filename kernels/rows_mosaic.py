"""Kernels on Hopper GPUs that work row by row: each warpgroup takes a row at a time, whole in shared memory.

One program runs on each SM. Its warpgroups go through rows of their own and do not wait for each other; TMA loads their
next rows meanwhile. A step reads its row from shared memory as often as it likes, in chunks, so that what it holds in
registers does not grow with the row.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ultrascale_jax.kernels.device import cores, vary_alike

LANES = 128
"""Threads of a warpgroup. A row is `[D / LANES, LANES]` in memory: TMA takes at most 256 elements of a dim."""

MEMORY = 224 * 1024
"""Bytes of shared memory for rows, vector and sums; a Hopper SM has 227 KiB for a program."""

REGISTERS = 16384
"""Elements of the sums that a program's warpgroups carry together: a quarter of the registers of an SM."""


class Chunks:
    """How a row of D elements is cut: chunks `[size, LANES]`, from `starts` on, each thread with neighbours of it."""

    def __init__(self, D: int):
        each = D // LANES
        sizes = (n for n in range(1, 17) if each % n == 0)
        self.size = max(sizes, key=lambda n: (math.gcd(n, 8), n))
        self.starts = range(0, each, self.size)
        self.layout = plgpu.Layout.WG_STRIDED((self.size, LANES), vec_size=math.gcd(self.size, 8))

    def load(self, ref: Any, start: int) -> jax.Array:
        """The chunk of a row `[D / LANES, LANES]`, in float32."""
        part = plgpu.load(ref.at[pl.ds(start, self.size)], layout=self.layout)
        return part.astype(jnp.float32)

    def store(self, ref: Any, start: int, values: jax.Array) -> None:
        """Write the values into the chunk, in the type of `ref`."""
        ref[pl.ds(start, self.size)] = values.astype(ref.dtype)

    def zeros(self) -> jax.Array:
        """Zeros for a sum of chunks."""
        return plgpu.layout_cast(jnp.zeros((self.size, LANES), jnp.float32), self.layout)


def stages(D: int) -> int:
    """Rows that a warpgroup has loaded or is loading: more where they are short."""
    return min(8, max(2, 8192 // D))


def warpgroups(rows: Sequence[jax.Array], sums: bool) -> int:
    """Warpgroups of a program for these `[M, D]` rows."""
    D = rows[0].shape[1]
    own = stages(D) * D * sum(x.dtype.itemsize for x in rows)
    own += 4 * Chunks(D).size * LANES if sums else 0
    return min(4, REGISTERS // D if sums else 4, (MEMORY - 4 * D) // own)


def for_each_row(
    step: Callable,
    name: str,
    rows: Sequence[jax.Array],
    vector: jax.Array,
    *,
    sums: bool = False,
    programs: int | None = None,
) -> tuple[jax.Array, ...]:
    """Call `step(rows, vector, out, sums)` in a kernel for every row.

    Args:
      step: gets in shared memory the rows with one number and the vector, each `[D / LANES, LANES]`; in global memory
        the row of the result; and the sums before this row. It writes the result and returns the new sums.
      rows: `[M, D]` of one type each, D a multiple of 128.
      vector: `[D]` float32.
      sums: whether there are sums, a tuple of a row's chunks.
      programs: programs that run at once; none is one on each SM.

    Returns:
      The result, as a row of `rows`, and with `sums` the sum over all rows, `[D]` float32.
    """
    (M, D), programs = rows[0].shape, programs or cores()
    tall, depth, together, chunks = D // LANES, stages(D), warpgroups(rows, sums), Chunks(D)
    out = [jax.ShapeDtypeStruct((M, tall, LANES), rows[0].dtype)]
    out += [jax.ShapeDtypeStruct((programs, tall, LANES), jnp.float32)] if sums else []

    def body(*refs):
        *rows_g, vector_g, out_g = refs[: len(rows) + 2]
        total_g, (rows_s, vector_s, loaded, there, sums_s, summed) = (
            refs[len(rows) + 2 : -6],
            refs[-6:],
        )
        wg = lax.axis_index("wg")
        row_of, count = share(M, together, programs)
        pl.when(wg == 0)(lambda: plgpu.copy_gmem_to_smem(vector_g, vector_s, there))
        plgpu.barrier_wait(there)

        def load(n, slot, barrier):
            for x_g, x_s in zip(rows_g, rows_s, strict=True):
                plgpu.copy_gmem_to_smem(x_g.at[row_of(n)], x_s.at[wg, slot], barrier)

        def one(n, slot, state):
            return step([x_s.at[wg, slot] for x_s in rows_s], vector_s, out_g.at[row_of(n)], state)

        zeros = tuple(chunks.zeros() for _ in chunks.starts if sums)
        state = loaded_ahead(one, count, load, loaded, depth, zeros)
        if sums:
            _add_up(chunks, state, total_g[0].at[lax.axis_index("program")], sums_s, summed)

    memory = (
        [plgpu.SMEM((together, depth, tall, LANES), x.dtype) for x in rows],
        plgpu.SMEM((tall, LANES), jnp.float32),
        plgpu.Barrier(num_arrivals=len(rows), num_barriers=together * depth),
        plgpu.Barrier(num_arrivals=1),
        plgpu.SMEM((together, chunks.size, LANES), jnp.float32) if sums else None,
        plgpu.Barrier(num_arrivals=together) if sums else None,
    )
    operands = [*(x.reshape(M, tall, LANES) for x in rows), vector.reshape(tall, LANES)]
    y, *totals = call(body, name, out, programs, together, memory, operands)
    return y.reshape(M, D), *(jnp.sum(total, axis=0).reshape(D) for total in totals)


def share(total: int, together: int, programs: int) -> tuple[Callable, jax.Array]:
    """Which of `total` items this warpgroup's n-th is, and how many it has."""
    first = lax.axis_index("program") * together + lax.axis_index("wg")
    stride = programs * together
    return lambda n: first + n * stride, lax.div(total - first + stride - 1, stride)


def loaded_ahead(
    step: Callable, count: jax.Array, load: Callable, loaded: Any, depth: int, state: Any = ()
) -> Any:
    """The state after `step(n, slot, state)` for each n below count, with the next `depth` loaded meanwhile.

    Args:
      step: may write to the slot too; what it started to copy from there is copied when it returns.
      load: `load(n, slot, barrier)` starts the copies of n into the slot.
      loaded: barriers of all warpgroups, `depth` for each.
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


def call(
    body: Callable,
    name: str,
    out: Sequence[jax.ShapeDtypeStruct],
    programs: int,
    together: int,
    memory: Any,
    operands: Sequence[jax.Array],
) -> list[jax.Array]:
    """The kernel's results, typed as varying over the mesh axes over which an operand does."""
    results = plgpu.kernel(
        body,
        out_type=list(out),
        grid=(programs,),
        grid_names=("program",),
        num_threads=together,
        thread_name="wg",
        scratch_types=memory,
        kernel_name=name,
    )(*operands)
    return vary_alike(*results, *operands)[: len(out)]


def _add_up(chunks: Chunks, own: Sequence[jax.Array], total_g: Any, sums_s: Any, summed: Any):
    """Write the sum over the program's warpgroups of what each of them has."""
    wg = lax.axis_index("wg")

    def meet():
        plgpu.barrier_arrive(summed)
        plgpu.barrier_wait(summed)

    for start, part in zip(chunks.starts, own, strict=True):
        chunks.store(sums_s.at[wg], 0, part)
        meet()

        @pl.when(wg == 0)
        def _(start=start):
            parts = [chunks.load(sums_s.at[n], 0) for n in range(sums_s.shape[0])]
            chunks.store(total_g, start, functools.reduce(operator.add, parts))

        meet()
