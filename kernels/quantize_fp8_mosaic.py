"""Float8 quantisation on Hopper GPUs: the input is read once, and only float8 and scales are written.

A warpgroup takes a tile of 128 x 128 at a time. For both orientations it reads its tile from shared memory once along
the rows and once along the columns (the matrix load instruction transposes 16-bit elements), so that each block of 128
is in four neighbouring threads either way, and writes float8 through shared memory.

No GPU has run it: tests run it in the GPU interpreter, and compile it for H100s.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ultrascale_jax.kernels.pipeline_mosaic import launch
from ultrascale_jax.kernels.rows_mosaic import LANES, for_each_part

TILE = 128
"""Rows and columns of a tile, and elements of a block."""

HALF = 64
"""Rows of a tile that are in registers at once."""

STAGES = 2
"""Tiles that a warpgroup has loaded or is loading."""

WARPGROUPS = 2
"""Warpgroups of a program: each has 96 KiB of shared memory."""

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
SWIZZLED_FP8 = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))


def quantize(
    x: jax.Array, scale_of: Callable, dtype: jax.typing.DTypeLike, *, both: bool, tiles: bool
) -> list[tuple[jax.Array, jax.Array]]:
    """Return values in `dtype` and scales of x, `[M, K]`, and with `both` also of its transpose.

    `scale_of` turns largest magnitudes into scales, of each tile if `tiles`, or else of each block of 128 columns.
    """
    (M, K), turns = x.shape, 2 if both else 1
    height, width = M // TILE, K // TILE
    shapes = [(M, K), (K, M)][:turns]
    # Blocks below each other are next to each other in memory.
    scales = [(height, width)] if tiles else [(k // TILE, m) for m, k in shapes]
    out = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    out += [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in scales]

    def body(x_g, *refs):
        out_g, (x_s, values_s, scales_s, loaded) = refs[: len(out)], refs[len(out) :]
        wg = lax.axis_index("wg")

        def place(tile):
            return lax.div(tile, width), lax.rem(tile, width)

        def load(tile, slot, barrier):
            rows, columns = (pl.ds(i * TILE, TILE) for i in place(tile))
            plgpu.copy_gmem_to_smem(x_g.at[rows, columns], x_s.at[wg, slot], barrier)

        def step(tile, slot, _):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            refs = x_s.at[wg, slot], values_s.at[wg], None if tiles else scales_s.at[wg]
            _quantize_tile(scale_of, place(tile), *refs, out_g[:turns], out_g[turns:])
            return ()

        for_each_part(height * width, WARPGROUPS, load, step, loaded, STAGES)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    memory = (
        plgpu.SMEM((WARPGROUPS, STAGES, TILE, TILE), x.dtype, transforms=SWIZZLED),
        plgpu.SMEM((WARPGROUPS, turns, 2, HALF, TILE), dtype, transforms=SWIZZLED_FP8),
        None if tiles else plgpu.SMEM((WARPGROUPS, turns, TILE), jnp.float32),
        plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS * STAGES),
    )
    options = {"warpgroups": WARPGROUPS, "memory": memory, "approx_math": False}
    results = launch(body, "quantize_fp8", out, [x], **options)
    scales = [results[-1], results[-1].T] if tiles else [s.T for s in results[turns:]]
    return list(zip(results[:turns], scales, strict=False))


def _quantize_tile(scale_of, place, x_s, values_s, scales_s, values_g, scales_g) -> None:
    """Quantise one tile: `values_s` are `[turns, 2, HALF, TILE]`, `scales_s` `[turns, TILE]`, or none for one scale."""

    def load(turn, half):
        part = pl.ds(half * HALF, HALF)
        ref = x_s.at[:, part].transpose((1, 0)) if turn else x_s.at[part]
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)

    whole: jax.Array | float = 1.0
    if scales_s is None:
        largest = jnp.maximum(jnp.abs(load(0, 0)), jnp.abs(load(0, 1)))
        scale = _scalar(scale_of, jnp.max(jnp.max(largest, axis=1)))
        scales_g[0][place] = scale
        whole = 1 / scale
    for turn, target_g in enumerate(values_g):
        row, column = place[::-1] if turn else place
        for half in range(2):
            x, part = load(turn, half), pl.ds(half * HALF, HALF)
            inverse = whole
            if scales_s is not None:
                scales = scale_of(jnp.max(jnp.abs(x), axis=1))
                scales_s[turn, part] = scales
                inverse = lax.broadcast_in_dim(1 / scales, x.shape, (0,))
            values_s[turn, half] = (x * inverse).astype(values_s.dtype)
            plgpu.commit_smem()
            rows = pl.ds(row * TILE + half * HALF, HALF)
            target = target_g.at[rows, pl.ds(column * TILE, TILE)]
            plgpu.copy_smem_to_gmem(values_s.at[turn, half], target)
        if scales_s is not None:
            target = scales_g[turn].at[column, pl.ds(row * TILE, TILE)]
            plgpu.copy_smem_to_gmem(scales_s.at[turn], target)


def _scalar(scale_of: Callable, amax: jax.Array) -> jax.Array:
    """Apply `scale_of` to one number; only an array gives access to its bits."""
    layout = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
    return jnp.max(scale_of(plgpu.layout_cast(jnp.full((LANES,), amax), layout)))
