"""Grouped matrix products on Hopper GPUs: every expert's rows times its own matrix, in one kernel.

One program runs on each SM and takes every n-th tile of the result. Two warpgroups multiply, each for half of the tile,
and a third one loads ahead by TMA:

    forward, input gradient    y[rows of e] = x[rows of e] w[e]       a tile is 128 rows of one expert, 256 columns
    weight gradient            dw[e] = x[rows of e]^T dy[rows of e]   a tile is 256 x 128 of one expert's matrix

Groups need not be aligned. TMA starts at multiples of 8 rows (the swizzle's pattern), so a tile starts up to 7 rows
before its expert's. A forward tile stores the expert's own rows alone, by copies of 128, 64, ... 1 rows; in a
weight gradient foreign rows of x are cleared in shared memory, in the first and the last step of a group alone. The
rows after the last group are one more group, without products, whose tiles are zeros.

No GPU has run them: tests run them in the GPU interpreter, and compile them for H100s.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ultrascale_jax.kernels.grouped_matmul import ALIGNED, MULTIPLE
from ultrascale_jax.kernels.pipeline_mosaic import (
    STRIP,
    WARPGROUPS,
    Tile,
    for_each_tile,
    launch,
    store,
    with_accumulator,
)

ROWS = 128
"""Rows of a forward tile."""

DEPTH = 64
"""Elements of the contracted dim in one step: 128 bytes of bfloat16, the width of the swizzle."""

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
ROW_BY_ROW = (plgpu.TilingTransform((1, 64)), plgpu.SwizzleTransform(128))
"""The same order in memory for 64 columns, but any row may be the first of a copy."""


def products(
    x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool = False
) -> jax.Array:
    """Compute `grouped_matmul`; rows that belong to no expert may hold anything.

    No transpose of `w` is made. Below, D is the dim of x, and F that of the result.
    """
    (R, D), E, F = x.shape, w.shape[1], w.shape[0 if transposed else 2]
    half = _half(F)
    width = WARPGROUPS * half
    plan, count = _row_tiles(sizes, R)

    specs = functools.partial(_row_specs, transposed, width)

    def body(plan_g, count_g, x_g, w_g, y_g):
        tiles = count_g[0], F // width

        def tile_at(loop, out_s):
            tile, column = plgpu.planar_snake(loop.index[0], tiles, 0, STRIP)
            expert, start, first, rows = (plan_g[i, tile] for i in range(4))
            start = pl.multiple_of(start, ALIGNED)

            def copy(part_s, part):
                offset = column * width + lax.axis_index("wg") * half + part
                _store_rows(part_s, y_g, start, first, rows, pl.ds(offset, 64))

            steps = jnp.where(expert < E, D // DEPTH, 0)
            operands = x_g, w_g.at[:, jnp.minimum(expert, E - 1)]
            multiply = functools.partial(_multiply_rows, transposed, half)
            wrapper = _stored((ROWS, half), out_s, copy)
            return Tile(operands, specs(start, column), steps, multiply, wrapper)

        out_s = plgpu.SMEM((WARPGROUPS, ROWS, 64), y_g.dtype, transforms=ROW_BY_ROW)
        operands = x_g, w_g.at[:, 0]
        for_each_tile((tiles[0] * tiles[1],), tile_at, operands, specs(0, 0), out_s)

    out = jax.ShapeDtypeStruct((R, F), x.dtype)
    return launch(body, "grouped_matmul", [out], (plan, count, x, w))[0]


def _row_specs(transposed: bool, width: int, start: Any, column: Any) -> list:
    """Return specs of the blocks of rows from `start` on, and of a column of tiles of the expert's matrix."""
    rows = (pl.Element(ROWS), DEPTH), lambda k: (start, k)
    matrix = (DEPTH, width), lambda k: (k, column)
    if transposed:
        matrix = (width, DEPTH), lambda k: (column, k)
    return [plgpu.BlockSpec(*spec, transforms=SWIZZLED) for spec in (rows, matrix)]


def _multiply_rows(transposed: bool, half: int, _, x_s, w_s, acc):
    """Add the product of a block of rows with this warpgroup's `half` of the matrix's."""
    part = pl.ds(lax.axis_index("wg") * half, half)
    plgpu.wgmma(acc, x_s, w_s.at[part].transpose((1, 0)) if transposed else w_s.at[:, part])
    plgpu.wgmma_wait(0)
    return acc


def weight_gradient(x: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return `[D, E, F]`: for each expert the transpose of its rows of `x` times its rows of `dy`, zeros without rows.

    `x` is `[R, D]`, and `dy` `[R, F]` is finite in all rows.
    """
    D, F, E = x.shape[1], dy.shape[1], sizes.shape[0]
    half, width = _half(D), MULTIPLE
    height = WARPGROUPS * half

    def block(start, size, at):
        rows = pl.Element(DEPTH), size
        return plgpu.BlockSpec(rows, lambda k: (start + k * DEPTH, at), transforms=SWIZZLED)

    def specs(start, row, column):
        return [block(start, height, row), block(start, width, column)]

    def body(plan_g, x_g, dy_g, dw_g):
        tiles = D // height, F // width

        def tile_at(loop, out_s):
            expert, tile = loop.index
            row, column = plgpu.planar_snake(tile, tiles, 0, STRIP)
            start, first, length = (plan_g[i, expert] for i in range(3))
            start = pl.multiple_of(start, ALIGNED)

            def copy(part_s, part):
                rows = pl.ds(row * height + lax.axis_index("wg") * half, half)
                columns = pl.ds(column * width + part, 64)
                plgpu.copy_smem_to_gmem(part_s, dw_g.at[rows, expert, columns])

            steps = lax.div(length + DEPTH - 1, DEPTH)
            step = functools.partial(_multiply_columns, half, first, length)
            wrapper = _stored((half, width), out_s, copy)
            return Tile((x_g, dy_g), specs(start, row, column), steps, step, wrapper)

        out_s = plgpu.SMEM((WARPGROUPS, half, 64), dw_g.dtype, transforms=SWIZZLED)
        for_each_tile((E, tiles[0] * tiles[1]), tile_at, (x_g, dy_g), specs(0, 0, 0), out_s)

    out = jax.ShapeDtypeStruct((D, E, F), x.dtype)
    return launch(body, "grouped_matmul_weight_gradient", [out], (_groups(sizes), x, dy))[0]


def _multiply_columns(half: int, first, length, index, x_s, dy_s, acc):
    """Add the product of this warpgroup's `half` of x's columns with dy, over the rows from `first` to `length`."""
    part_s = x_s.at[:, pl.ds(lax.axis_index("wg") * half, half)]
    start = index[0] * DEPTH
    foreign = (start < first) | (start + DEPTH > length)
    pl.when(foreign)(lambda: _clear_foreign_rows(part_s, first - start, length - start))
    plgpu.wgmma(acc, part_s.transpose((1, 0)), dy_s)
    plgpu.wgmma_wait(0)
    return acc


def _clear_foreign_rows(block_s, first, end) -> None:
    """Write zeros into the rows before `first` and from `end` on."""
    row = plgpu.broadcasted_iota(jnp.int32, block_s.shape, 0, layout=plgpu.Layout.WGMMA)
    block = block_s[...]
    block_s[...] = jnp.where((first <= row) & (row < end), block, jnp.zeros_like(block))
    plgpu.commit_smem()


def _half(size: int) -> int:
    """Return the part of one warpgroup in a tile along a dim of this size."""
    return 128 if size % (WARPGROUPS * 128) == 0 else 64


def _row_tiles(sizes: jax.Array, R: int) -> tuple[jax.Array, jax.Array]:
    """Return the tiles of the rows, a column each (expert or E; start; first own row; own rows), and their number.

    A group of n tiles ends in the n-th after its start, so all its tiles but the last are followed by a later start:
    there are at most as many tiles as R has without groups, and one more for each further group.
    """
    ends = jnp.append(jnp.cumsum(sizes), R)
    starts = jnp.append(0, ends[:-1])
    aligned = starts // ALIGNED * ALIGNED
    tiles = jnp.where(ends > starts, -((aligned - ends) // ROWS), 0)
    last = jnp.cumsum(tiles)
    tile = jnp.arange(-(-R // ROWS) + sizes.shape[0])
    expert = jnp.sum(tile[:, None] >= last[None, :-1], axis=1)
    start = aligned[expert] + (tile - (last - tiles)[expert]) * ROWS
    first = jnp.maximum(starts[expert] - start, 0)
    rows = jnp.minimum(ends[expert] - start, ROWS) - first
    return jnp.stack([expert, start, first, rows]).astype(jnp.int32), last[-1:].astype(jnp.int32)


def _groups(sizes: jax.Array) -> jax.Array:
    """Return every group as a column of start, number of its first own row, rows up to its end."""
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    aligned = starts // ALIGNED * ALIGNED
    lengths = jnp.where(sizes > 0, ends - aligned, 0)
    return jnp.stack([aligned, starts - aligned, lengths]).astype(jnp.int32)


def _stored(shape: tuple[int, int], out_s: Any, copy: Callable) -> Callable:
    """Return the `wrapper` of a tile that stores its sums, 64 columns at a time, by `copy(buffer, first column)`."""
    part_s = out_s.at[lax.axis_index("wg")]

    def finish(sums):
        def values_at(column):
            return sums[:, column : column + 64]

        store(shape[1], values_at, part_s, functools.partial(copy, part_s))

    return with_accumulator(shape, finish)


def _store_rows(out_s, y_g, start, first, rows, columns) -> None:
    """Copy `rows` rows from `first` on, by powers of two, because TMA needs a known number of rows."""
    size = ROWS
    while size:

        def copy(first=first, size=size):
            target = y_g.at[pl.ds(start + first, size), columns]
            plgpu.copy_smem_to_gmem(out_s.at[pl.ds(first, size)], target, commit_group=False)

        pl.when(rows & size != 0)(copy)
        first += rows & size
        size //= 2
    plgpu.commit_smem_to_gmem_group()
