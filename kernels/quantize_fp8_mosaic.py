"""Float8 quantisation on Hopper GPUs: the input is read once, and only float8 and scales are written.

By rows, for one orientation: a warpgroup has a whole row in shared memory, so it can first compute the RMSNorm or
SwiGLU whose result is quantised (`rows_mosaic.py`).

By tiles of 128 x 128, for both orientations: a warpgroup reads its tile from shared memory once along the rows and once
along the columns (the matrix load instruction transposes 16-bit elements), so that each block of 128 is in four
neighbouring threads either way, and writes float8 through shared memory.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ultrascale_jax.kernels.device import cores
from ultrascale_jax.kernels.rows_mosaic import (
    LANES,
    WIDEST,
    Chunks,
    call,
    for_each_row,
    loaded_ahead,
    share,
    warpgroups,
)

TILE = 128
"""Rows and columns of a tile, and elements of a block."""

HALF = 64
"""Rows of a tile that are in registers at once."""

STAGES = 2
"""Tiles that a warpgroup has loaded or is loading."""

WARPGROUPS = 2
"""Those of a program by tiles: each has 96 KiB of shared memory."""

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
SWIZZLED_FP8 = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))


class Blocks(Chunks):
    """A row cut into chunks of `size` blocks; each block is in one warp, which reduces it."""

    MULTIPLE = 4 * LANES
    """Rows are multiples of it."""

    def __init__(self, K: int):
        tall = K // LANES
        if tall % 8 == 0:
            self.size, tiling = 8, ((8, LANES), (2, LANES), (8,))
            dims = {"warp_dims": (-5,), "lane_dims": (-3, -2)}
        else:
            self.size, tiling = 4, ((4, LANES), (4,))
            dims = {"warp_dims": (-3,), "lane_dims": (-2,)}
        self.starts = range(0, tall, self.size)
        self.layout = plgpu.Layout.TILED(plgpu.Tiling(tiling), **dims, vector_dim=-1)


def rows_fit(rows: Sequence[jax.Array], vectors: Sequence[jax.Array] = (), *, blocks: bool) -> bool:
    """Whether `by_rows` takes rows of this length."""
    K = rows[0].shape[1]
    multiple = Blocks.MULTIPLE if blocks else LANES
    return K % multiple == 0 and K <= WIDEST and warpgroups(rows, len(vectors)) > 0


def by_rows(
    rows: Sequence[jax.Array],
    scale_of: Callable,
    dtype: jax.typing.DTypeLike,
    *,
    blocks: bool,
    combine: Callable | None = None,
    vectors: Sequence[jax.Array] = (),
    programs: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Values and scales of what is made of the rows.

    Args:
      rows: `[M, K]` bfloat16 each, of a length that `rows_fit`.
      scale_of: scales of an array of largest magnitudes.
      dtype: of the values.
      blocks: whether each block of 128 has a scale, or each row.
      combine: `combine(chunks, rows, vectors)` gives the function that makes the chunk from a start; it is rounded
        to the rows' type. None quantises the only row.
      vectors: `[K]` float32, for `combine`.
      programs: programs that run at once; none is one on each SM.

    Returns:
      `[M, K]` of `dtype`, and `[M, K / 128]` or `[M, 1]` float32.
    """
    M, K = rows[0].shape
    chunks = Chunks(K)

    def step(row, rows, vectors, out, _):
        x_s, values_g, scales_g = rows[0], out[0].at[row], out[1].at[row]
        if combine:
            made = combine(chunks, rows, vectors)
            for at in chunks.starts:
                chunks.store(x_s, at, made(at))
        if blocks:
            _quantize_blocks(Blocks(K), x_s, scale_of, values_g, rows[-1], scales_g)
        else:
            _quantize_row(chunks, x_s, scale_of, values_g, scales_g)
        return ()

    out = [
        jax.ShapeDtypeStruct((M, K // LANES, LANES), dtype),
        jax.ShapeDtypeStruct((M, K // LANES if blocks else 1), jnp.float32),
    ]
    results = for_each_row(
        step, "quantize_fp8", rows, vectors, out, scratch=blocks, programs=programs
    )
    return results[0].reshape(M, K), results[1]


def _quantize_blocks(chunks: Blocks, x_s, scale_of: Callable, values_g, scales_s, scales_g):
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for at in chunks.starts:
        x = chunks.load(x_s, at)
        scales = scale_of(jnp.max(jnp.abs(x), axis=1))
        chunks.store(values_g, at, x * lax.broadcast_in_dim(1 / scales, x.shape, (0,)))
        scales_s[pl.ds(at, chunks.size)] = scales
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(scales_s, scales_g)


def _quantize_row(chunks: Chunks, x_s, scale_of: Callable, values_g, scales_g):
    amax = chunks.zeros()
    for at in chunks.starts:
        amax = jnp.maximum(amax, jnp.abs(chunks.load(x_s, at)))
    scale = _scalar(scale_of, jnp.max(amax))
    scales_g[0] = scale
    inverse = 1 / scale
    for at in chunks.starts:
        chunks.store(values_g, at, chunks.load(x_s, at) * inverse)


def normed(eps: float) -> Callable:
    """For `by_rows`: RMSNorm of the row with the weight that is the vector."""

    def combine(chunks, rows, vectors):
        x_s, squares = rows[0], chunks.zeros()
        for at in chunks.starts:
            squares += jnp.square(chunks.load(x_s, at))
        scale = lax.rsqrt(jnp.sum(squares) / (x_s.shape[0] * LANES) + eps)
        return lambda at: chunks.load(x_s, at) * scale * chunks.load(vectors[0], at)

    return combine


def gated(chunks: Chunks, rows, _) -> Callable:
    """For `by_rows`: SwiGLU of gate and up."""

    def made(at):
        gate = chunks.load(rows[0], at)
        return gate / (1 + jnp.exp(-gate)) * chunks.load(rows[1], at)

    return made


def by_tiles(
    x: jax.Array,
    scale_of: Callable,
    dtype: jax.typing.DTypeLike,
    *,
    both: bool,
    tiles: bool = False,
    inverses: Sequence[jax.Array] = (),
    programs: int | None = None,
) -> list[tuple[jax.Array, ...]]:
    """Values and scales of x, and with `both` of its transpose.

    Args:
      x: `[M, K]` bfloat16, multiples of 128.
      scale_of: scales of an array of largest magnitudes.
      dtype: of the values.
      both: whether x is quantised in both orientations.
      tiles: whether each tile has a scale, or each block of 128 columns.
      inverses: the scales' inverses where they are known: `[M]` float32, and with `both` `[K]` of the transpose.
      programs: programs that run at once; none is one on each SM.

    Returns:
      `[M, K]` and `[M, K / 128]` or `[M / 128, K / 128]` float32, where they are not known; the transpose's.
    """
    (M, K), turns = x.shape, 2 if both else 1
    height, width = M // TILE, K // TILE
    programs = programs or cores()
    shapes = [(M, K), (K, M)][:turns]
    out = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    if tiles:
        out.append(jax.ShapeDtypeStruct((height, width), jnp.float32))
    elif not inverses:
        # Blocks below each other are next to each other in memory.
        out += [jax.ShapeDtypeStruct((k // TILE, m), jnp.float32) for m, k in shapes]

    def body(x_g, *refs):
        inverses_g, values_g = refs[: len(inverses)], refs[len(inverses) :][:turns]
        scales_g = refs[len(inverses) + turns : len(inverses) + len(out)]
        x_s, inverses_s, values_s, scales_s, loaded = refs[len(inverses) + len(out) :]
        wg = lax.axis_index("wg")
        tile_of, count = share(height * width, WARPGROUPS, programs)

        def place(n):
            return lax.div(tile_of(n), width), lax.rem(tile_of(n), width)

        def load(n, slot, barrier):
            parts = [pl.ds(i * TILE, TILE) for i in place(n)]
            plgpu.copy_gmem_to_smem(x_g.at[parts[0], parts[1]], x_s.at[wg, slot], barrier)
            for ref_g, ref_s, part in zip(inverses_g, inverses_s, parts, strict=False):
                plgpu.copy_gmem_to_smem(ref_g.at[part], ref_s.at[wg, slot], barrier)

        def one(n, slot, _):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            known = [ref.at[wg, slot] for ref in inverses_s]
            scales = None if scales_s is None else scales_s.at[wg]
            own = x_s.at[wg, slot], known, values_s.at[wg], scales
            _quantize_tile(scale_of, place(n), *own, values_g, scales_g)
            return ()

        loaded_ahead(one, count, load, loaded, STAGES)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    memory = (
        plgpu.SMEM((WARPGROUPS, STAGES, TILE, TILE), x.dtype, transforms=SWIZZLED),
        [plgpu.SMEM((WARPGROUPS, STAGES, TILE), jnp.float32) for _ in inverses],
        plgpu.SMEM((WARPGROUPS, turns, 2, HALF, TILE), dtype, transforms=SWIZZLED_FP8),
        None if inverses or tiles else plgpu.SMEM((WARPGROUPS, turns, TILE), jnp.float32),
        plgpu.Barrier(num_arrivals=1 + len(inverses), num_barriers=WARPGROUPS * STAGES),
    )
    results = call(body, "quantize_fp8", out, programs, WARPGROUPS, memory, [x, *inverses])
    values, scales = results[:turns], results[turns:]
    if inverses:
        return [(v,) for v in values]
    scales = [scales[0], scales[0].T][:turns] if tiles else [s.T for s in scales]
    return list(zip(values, scales, strict=True))


def _quantize_tile(scale_of, place, x_s, inverses_s, values_s, scales_s, values_g, scales_g):
    """One tile: `values_s` are `[turns, 2, HALF, TILE]`, `scales_s` `[turns, TILE]` or none."""

    def load(turn, half):
        part = pl.ds(half * HALF, HALF)
        ref = x_s.at[:, part].transpose((1, 0)) if turn else x_s.at[part]
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)

    whole = None
    if scales_g and scales_s is None:
        largest = jnp.maximum(jnp.abs(load(0, 0)), jnp.abs(load(0, 1)))
        scale = _scalar(scale_of, jnp.max(jnp.max(largest, axis=1)))
        scales_g[0][place] = scale
        whole = 1 / scale
    for turn, target_g in enumerate(values_g):
        row, column = place[::-1] if turn else place
        for half in range(2):
            x, part = load(turn, half), pl.ds(half * HALF, HALF)
            if whole is not None:
                inverse = whole
            elif inverses_s:
                layout = plgpu.Layout.WGMMA.reduce(1)
                known = plgpu.load(inverses_s[turn].at[part], layout=layout)
                inverse = lax.broadcast_in_dim(known, x.shape, (0,))
            else:
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
    """`scale_of` one number; its bits cannot be had but in an array."""
    layout = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
    return jnp.max(scale_of(plgpu.layout_cast(jnp.full((LANES,), amax), layout)))
