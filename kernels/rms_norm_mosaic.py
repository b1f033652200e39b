"""Backward pass of RMSNorm on Hopper GPUs: every row is read once, and nothing was saved for it.

    dx = r (dy w - r^2 x mean(dy w x)),   dw = sum over rows of r x dy,   r = 1 / sqrt(mean(x^2) + eps)

A warpgroup takes a row at a time, whole in shared memory, and reads it there in chunks, so that what it holds in
registers does not grow with the row. Each warpgroup adds up dw over its rows; XLA adds up the warpgroups' sums.

No GPU has run it: tests run it in the GPU interpreter, and compile it for H100s.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ultrascale_jax.kernels.device import cores
from ultrascale_jax.kernels.pipeline_mosaic import launch
from ultrascale_jax.kernels.rows_mosaic import LANES, for_each_part

MEMORY = 224 * 1024
"""Bytes of shared memory for rows and weight; a Hopper SM has 227 KiB for a program."""

REGISTERS = 16384
"""Elements of the sums that a program's warpgroups carry in all: a quarter of the registers of an SM."""


class Chunks:
    """Chunks `[size, LANES]` of a row of D elements, from `starts` on; each thread holds neighbours."""

    def __init__(self, D: int):
        each = D // LANES
        sizes = (n for n in range(1, 17) if each % n == 0)
        self.size = max(sizes, key=lambda n: (math.gcd(n, 8), n))
        self.starts = range(0, each, self.size)
        self.layout = plgpu.Layout.WG_STRIDED((self.size, LANES), vec_size=math.gcd(self.size, 8))

    def load(self, ref: Any, start: int) -> jax.Array:
        """Load the chunk of a row `[D / LANES, LANES]`, in float32."""
        part = plgpu.load(ref.at[pl.ds(start, self.size)], layout=self.layout)
        return part.astype(jnp.float32)

    def store(self, ref: Any, start: int, values: jax.Array) -> None:
        """Write the values into the chunk, in the type of `ref`."""
        ref[pl.ds(start, self.size)] = values.astype(ref.dtype)

    def zeros(self) -> jax.Array:
        """Zeros for a sum of chunks."""
        return plgpu.layout_cast(jnp.zeros((self.size, LANES), jnp.float32), self.layout)


def backward(
    x: jax.Array, weight: jax.Array, dy: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of x, `[M, D]` in its type, and of the weight, `[D]` float32, from the result's, `dy`."""
    (M, D), programs, chunks = x.shape, cores(), Chunks(x.shape[1])
    tall = D // LANES
    warpgroups, depth = _loaded_rows(D, x.dtype.itemsize + dy.dtype.itemsize)

    def body(x_g, dy_g, weight_g, dx_g, dw_g, x_s, dy_s, weight_s, loaded, weight_loaded):
        wg = lax.axis_index("wg")
        pl.when(wg == 0)(lambda: plgpu.copy_gmem_to_smem(weight_g, weight_s, weight_loaded))
        plgpu.barrier_wait(weight_loaded)

        def load(row, slot, barrier):
            plgpu.copy_gmem_to_smem(x_g.at[row], x_s.at[wg, slot], barrier)
            plgpu.copy_gmem_to_smem(dy_g.at[row], dy_s.at[wg, slot], barrier)

        def step(row, slot, sums):
            rows = x_s.at[wg, slot], dy_s.at[wg, slot], weight_s
            return _pull_back(chunks, eps, *rows, dx_g.at[row], sums)

        zeros = tuple(chunks.zeros() for _ in chunks.starts)
        sums = for_each_part(M, warpgroups, load, step, loaded, depth, zeros)
        for start, values in zip(chunks.starts, sums, strict=True):
            chunks.store(dw_g.at[lax.axis_index("program") * warpgroups + wg], start, values)

    memory = (
        *[plgpu.SMEM((warpgroups, depth, tall, LANES), x.dtype)] * 2,
        plgpu.SMEM((tall, LANES), jnp.float32),
        plgpu.Barrier(num_arrivals=2, num_barriers=warpgroups * depth),
        plgpu.Barrier(num_arrivals=1),
    )
    out = [
        jax.ShapeDtypeStruct((M, tall, LANES), x.dtype),
        jax.ShapeDtypeStruct((programs * warpgroups, tall, LANES), jnp.float32),
    ]
    operands = [*(a.reshape(M, tall, LANES) for a in (x, dy)), weight.reshape(tall, LANES)]
    options = {"warpgroups": warpgroups, "memory": memory, "approx_math": False}
    dx, dw = launch(body, "rms_norm_backward", out, operands, **options)
    return dx.reshape(M, D), jnp.sum(dw, axis=0).reshape(D)


def _loaded_rows(D: int, element_bytes: int) -> tuple[int, int]:
    """Return the warpgroups of a program, and the rows of x and dy that each has loaded or is loading."""
    depth = min(8, max(2, 8192 // D))
    return min(4, REGISTERS // D, (MEMORY - 4 * D) // (depth * D * element_bytes)), depth


def _pull_back(chunks: Chunks, eps: float, x_s, dy_s, weight_s, dx_g, sums: tuple) -> tuple:
    """Write dx of one row, and return the chunks of dw with this row's."""
    D = x_s.shape[0] * LANES
    squares = products = chunks.zeros()
    for at in chunks.starts:
        x, dxw = chunks.load(x_s, at), chunks.load(dy_s, at) * chunks.load(weight_s, at)
        squares, products = squares + x * x, products + x * dxw
    scale = lax.rsqrt(jnp.sum(squares) / D + eps)
    mean = jnp.sum(products) / D * scale * scale
    dw = []
    for at, total in zip(chunks.starts, sums, strict=True):
        x, dy = chunks.load(x_s, at), chunks.load(dy_s, at)
        chunks.store(dx_g, at, (dy * chunks.load(weight_s, at) - x * mean) * scale)
        dw.append(total + dy * (x * scale))
    return tuple(dw)
