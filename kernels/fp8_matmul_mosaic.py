"""Block-scaled fp8 matrix product on Hopper GPUs.

The matrix unit sums fp8 products in fewer bits than float32 has, so after every 128 of the contracted dim the sum is
scaled and added to one in float32 registers (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). A tile is 256 x 128. A
warpgroup has 128 of its rows and multiplies 64 at a time: 128 registers for the sums, 64 for the products. While one
warpgroup adds, the other one multiplies. Scales are loaded ahead like the values; 216 of 227 KiB of memory are in use.

No GPU has run it: tests run it in the GPU interpreter, and compile it for H100s.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ultrascale_jax.kernels.pipeline_mosaic import (
    STAGES,
    STRIP,
    WARPGROUPS,
    Tile,
    for_each_tile,
    launch,
    store,
)

BLOCK = 128
"""Elements of the contracted dim with one scale: 128 bytes, the width of the swizzle. All dims are multiples."""

ROWS = 64
"""Rows that a warpgroup multiplies at a time."""

WAVE = WARPGROUPS * ROWS
"""Rows that all warpgroups multiply at a time."""

PARTS = range(0, BLOCK, 64)
"""First columns of the parts of a sum: registers hold scales of rows of b for one part at a time."""

SWIZZLED = (plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(128))


def products(
    a: jax.Array,
    a_scales: jax.Array,
    b: jax.Array,
    b_scales: jax.Array,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Compute `fp8_matmul` of `[G, M, K]` and `[G, N, K]`, a group at a time."""
    (G, M, K), N = a.shape, b.shape[1]
    waves = 2 if M % (2 * WAVE) == 0 else 1
    height, steps, by_rows = waves * WAVE, K // BLOCK, b_scales.shape[1] == N
    tiles = M // height, N // BLOCK
    width = 128 // jnp.dtype(out_dtype).itemsize
    # Scales of one step are neighbours in memory, for TMA.
    scales = [jnp.swapaxes(s, 1, 2) for s in (a_scales, b_scales)[: 1 + by_rows]]
    operands = [*[a] * waves, b, *scales]
    specs = functools.partial(_specs, waves=waves, by_rows=by_rows)

    def body(*refs):
        *operands_g, tile_scales_g, y_g = refs

        def of_group(group):
            return [x_g.at[group] for x_g in operands_g]

        def tile_at(loop, out_s):
            group, tile = loop.index
            row, column = plgpu.planar_snake(tile, tiles, 0, STRIP)
            wg = lax.axis_index("wg")

            def multiply(index, *refs):
                tile_scale = None if by_rows else tile_scales_g[group, column, index[0]]
                return _step(*refs, tile_scale=tile_scale, waves=waves)

            def add_up(run):
                zeros = jnp.zeros((ROWS, PARTS.step), jnp.float32)
                zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
                for wave, total in enumerate(run(((zeros,) * len(PARTS),) * waves)):
                    rows = pl.ds(row * height + wave * WAVE + wg * ROWS, ROWS)
                    _store(total, out_s.at[wg], y_g.at[group, rows], column * BLOCK)

            return Tile(of_group(group), specs(row, column), steps, multiply, add_up)

        stored = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128)
        out_s = plgpu.SMEM((WARPGROUPS, ROWS, width), out_dtype, transforms=stored)
        grid, chained = (G, tiles[0] * tiles[1]), steps % STAGES == 0
        for_each_tile(grid, tile_at, of_group(0), specs(0, 0), out_s, chained=chained, waits=True)

    out = jax.ShapeDtypeStruct((G, M, N), out_dtype)
    return launch(body, "fp8_matmul", [out], [*operands, b_scales])[0]


def _specs(row: Any, column: Any, *, waves: int, by_rows: bool) -> list:
    """Return specs of the blocks of a for each wave, of b, scales of a, and with `by_rows` scales of b."""
    a = [((WAVE, BLOCK), lambda k, n=n: (row * waves + n, k)) for n in range(waves)]
    b = (BLOCK, BLOCK), lambda k: (column, k)
    scales = [((1, waves * WAVE), lambda k: (k, row)), ((1, BLOCK), lambda k: (k, column))]
    return [
        *(plgpu.BlockSpec(*spec, transforms=SWIZZLED) for spec in (*a, b)),
        *(plgpu.BlockSpec(*spec) for spec in scales[: 1 + by_rows]),
    ]


def _step(*refs: Any, tile_scale: Any, waves: int) -> tuple:
    """Add one more block of the contracted dim to the sums; `refs` are operands, their barriers, and the sums before.

    A wave waits for its own rows of a. The wait also keeps the compiler from spreading the additions of one wave over
    the next one, for which there are not enough registers.
    """
    count, sums = len(refs) // 2, refs[-1]
    blocks, barriers = refs[:count], refs[count:-1]
    a_s, (b_s, a_scales_s, *b_scales_s) = blocks[:waves], blocks[waves:]
    wg = lax.axis_index("wg")
    for barrier in barriers[waves:]:
        plgpu.barrier_wait(barrier)

    def add(n, total, acc):
        plgpu.wgmma(acc, a_s[n].at[pl.ds(wg * ROWS, ROWS)], b_s.transpose((1, 0)))
        scale = _load(a_scales_s.at[0, pl.ds(n * WAVE + wg * ROWS, ROWS)], 1)
        if tile_scale is not None:
            scale = scale * tile_scale
        scale = lax.broadcast_in_dim(scale, total[0].shape, [0])
        plgpu.wgmma_wait(0)
        product, sums = acc[...], []
        for start, part in zip(PARTS, total, strict=True):
            scaled = product[:, start : start + PARTS.step] * scale
            if b_scales_s:
                columns = _load(b_scales_s[0].at[0, pl.ds(start, PARTS.step)], 0)
                scaled = scaled * lax.broadcast_in_dim(columns, part.shape, [1])
            sums.append(part + scaled)
        return tuple(sums)

    new_sums = []
    for n, total in enumerate(sums):
        plgpu.barrier_wait(barriers[n])
        accumulator = plgpu.ACC((ROWS, BLOCK), jnp.float32)
        new_sums.append(pl.run_scoped(functools.partial(add, n, total), accumulator))
    # The scales have been read before TMA writes there again.
    plgpu.commit_smem()
    return tuple(new_sums)


def _store(total: tuple, out_s: Any, rows_g: Any, column: Any) -> None:
    """Write a wave's sums into its rows from `column` on, by way of shared memory."""
    width = out_s.shape[1]

    def values_at(start):
        part, first = divmod(start, PARTS.step)
        return total[part][:, first : first + width]

    def copy(start):
        plgpu.copy_smem_to_gmem(out_s, rows_g.at[:, pl.ds(column + start, width)])

    store(BLOCK, values_at, out_s, copy)


def _load(scales_s: Any, reduced: int) -> jax.Array:
    """Load scales for an accumulator's rows (`reduced` 1) or columns (0)."""
    return plgpu.load(scales_s, layout=plgpu.Layout.WGMMA.reduce(reduced), optimized=False)
