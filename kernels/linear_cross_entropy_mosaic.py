"""Multiply by the output head on Hopper GPUs; the results, the logits, are never in memory.

Both kernels compute them tile by tile, 128 tokens x 256 words in float32 registers, half of the words in either
warpgroup:

    statistics    of each half tile: log-sum-exp of a token's logits, and the target's logit if it is there
    gradient      of the logits, in bfloat16, from the log-sum-exp over the full vocabulary

The statistics of half tiles are 1/64 of the logits' bytes and are combined outside.

No GPU has run them: tests run them in the GPU interpreter, and compile them for H100s.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ultrascale_jax.kernels.linear_cross_entropy import ALIGNED, LOWEST, TILE
from ultrascale_jax.kernels.pipeline_mosaic import (
    STAGES,
    STRIP,
    WARPGROUPS,
    Tile,
    for_each_tile,
    launch,
    store,
    with_accumulator,
)

ROWS, WIDTH, DEPTH = TILE
"""A step's part of d_model, DEPTH, is 128 bytes of bfloat16, the width of the swizzle."""

HALF = WIDTH // WARPGROUPS
"""Words of a warpgroup's part of a tile."""

BY_ROW = plgpu.Layout.WGMMA.reduce(1)


def statistics(
    x: jax.Array, head: jax.Array, targets: jax.Array, words: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Compute `reference_statistics` of x `[M, D]`, head `[D, V]` and targets `[M]`, which are columns of head.

    The first `words` columns count, at most V, an int32 scalar.
    """
    M, V = x.shape[0], head.shape[1]

    def finish(logits, rows, part, word, out, _):
        words_g, targets_g, lse_g, target_logit_g = out
        hit = _numbers(logits) == _broadcast(_load(targets_g, rows) - word, logits)
        logits = jnp.where(_numbers(logits) < words_g[0] - word, logits, LOWEST)
        highest = jnp.max(logits, axis=1)
        total = jnp.sum(jnp.exp(logits - _broadcast(highest, logits)), axis=1)
        lse_g[part, rows] = highest + jnp.log(total)
        target_logit_g[part, rows] = jnp.sum(jnp.where(hit, logits, 0.0), axis=1)

    # The last tile may have columns beyond V, with logits that are none.
    targets = jnp.where(targets < V, targets, -1)
    parts = jax.ShapeDtypeStruct((-(-V // WIDTH) * WARPGROUPS, M), jnp.float32)
    lse, target_logit = _for_each_half_tile(
        finish, "linear_cross_entropy", x, head, None, V, [words.reshape(1), targets], [parts] * 2
    )
    return jax.nn.logsumexp(lse, axis=0), jnp.sum(target_logit, axis=0)


def gradient(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    words: jax.Array,
    lse: jax.Array,
    d_lse: jax.Array,
    d_target: jax.Array,
    start: jax.Array,
    width: int,
) -> jax.Array:
    """Return the gradients of the logits of the words from `start` on.

    They are `d_lse * exp(logits - lse)`, and `d_target` more for the target.

    Args:
      x, head, targets, words, lse: arguments and result of `statistics`; `[M]` float32 are lse, and the gradients
      d_lse, d_target: of the log-sum-exp and of the target's logit.
      start: int32 scalar, a multiple of 256.
      width: of the result `[M, width]` bfloat16, a multiple of 32; `start + width` is at most V.
    """

    def finish(logits, rows, part, word, out, out_s):
        words_g, *rows_g, d_g = out
        target, lse, d_lse, d_target = [_load(g, rows) for g in rows_g]

        def gradient_at(column):
            some = logits[:, column : column + 64]
            d = jnp.exp(some - _broadcast(lse, some)) * _broadcast(d_lse, some)
            d = jnp.where(_numbers(some) < words_g[0] - (word + column), d, 0.0)
            hit = _numbers(some) == _broadcast(target - (word + column), some)
            return d + jnp.where(hit, _broadcast(d_target, some), 0.0)

        def copy(column):
            plgpu.copy_smem_to_gmem(out_s, d_g.at[rows, pl.ds(part * HALF + column, 64)])

        store(HALF, gradient_at, out_s, copy)

    out = jax.ShapeDtypeStruct((x.shape[0], width), x.dtype)
    rows = words.reshape(1), targets, lse, d_lse, d_target
    name = "linear_cross_entropy_gradient"
    return _for_each_half_tile(finish, name, x, head, start, width, rows, [out])[0]


def _for_each_half_tile(
    finish: Callable,
    name: str,
    x: jax.Array,
    head: jax.Array,
    start: jax.Array | None,
    width: int,
    rows: Sequence[jax.Array],
    out: Sequence[jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    """Call `finish` with the logits of every half tile of `width` words from `start` on.

    It gets the logits, which rows they are, the number of the half tile from the start, its first word, the refs of
    `rows` and `out` in global memory, and shared memory for the copy of 64 columns.
    """
    tiles, steps = (x.shape[0] // ROWS, -(-width // WIDTH)), x.shape[1] // DEPTH
    starts = [] if start is None else [start.reshape(1)]
    across = 64 if head.shape[1] % 64 == 0 else ALIGNED
    swizzled = plgpu.TilingTransform((8, across)), plgpu.SwizzleTransform(2 * across)
    specs = functools.partial(_specs, swizzled)

    def body(x_g, head_g, *refs):
        first_tile = lax.div(refs[0][0], WIDTH) if starts else 0

        def tile_at(loop, out_s):
            row, column = plgpu.planar_snake(loop.index[0], tiles, 0, STRIP)
            wg = lax.axis_index("wg")

            def finish_part(logits):
                part, tokens = column * WARPGROUPS + wg, pl.ds(row * ROWS, ROWS)
                word = first_tile * WIDTH + part * HALF
                finish(logits, tokens, part, word, refs[len(starts) :], out_s.at[wg])

            wrapper = with_accumulator((ROWS, HALF), finish_part)
            return Tile((x_g, head_g), specs(row, first_tile + column), steps, _multiply, wrapper)

        out_s = plgpu.SMEM((WARPGROUPS, ROWS, 64), x.dtype, transforms=swizzled)
        grid, chained = (tiles[0] * tiles[1],), steps % STAGES == 0
        for_each_tile(grid, tile_at, (x_g, head_g), specs(0, 0), out_s, chained=chained)

    return launch(body, name, out, [x, head, *starts, *rows])


def _specs(swizzled: tuple, row: Any, column: Any) -> list:
    """Return specs of the blocks of a row of tiles of x, and of a column of tiles of the head."""
    return [
        plgpu.BlockSpec((ROWS, DEPTH), lambda k: (row, k), transforms=swizzled),
        plgpu.BlockSpec((DEPTH, WIDTH), lambda k: (k, column), transforms=swizzled),
    ]


def _multiply(_, x_s, head_s, acc):
    """Add the product of one block to the sums of this warpgroup's half."""
    plgpu.wgmma(acc, x_s, head_s.at[:, pl.ds(lax.axis_index("wg") * HALF, HALF)])
    plgpu.wgmma_wait(0)
    return acc


def _load(rows_g: Any, rows: Any) -> jax.Array:
    """Load the values of a tile's tokens."""
    return plgpu.load(rows_g.at[rows], layout=BY_ROW, optimized=False)


def _numbers(logits: jax.Array) -> jax.Array:
    """Return the column number of each logit."""
    return plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)


def _broadcast(row: jax.Array, logits: jax.Array) -> jax.Array:
    """Broadcast a token's value to each of its logits."""
    return lax.broadcast_in_dim(row, logits.shape, [0])
