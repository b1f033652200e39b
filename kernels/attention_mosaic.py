"""Flash attention on Hopper GPUs where each query sees one range of the keys: documents, windows, ring blocks.

A mask is two numbers for each query, the first key that it sees and the one after the last, so none of shape `[T, S]`
exists. A program has one tile of queries (keys, for their gradients) and runs over the tiles of the others that meet
its ranges: the rest are neither loaded nor multiplied. Only tiles at the edge of a range compare positions. Two
warpgroups compute, half a tile each, and a third one loads ahead by TMA. In the forward pass they take turns, so that
one is at its products while the other is at its softmax (FlashAttention-3, arXiv 2407.08608).

    forward    a tile of queries, over its keys       out, log-sum-exp
    dkv        a tile of keys, over its queries       dk, dv, summed over the query heads of one key head
    dq         a tile of queries, over its keys       dq

No GPU has run them: tests run them in the GPU interpreter, and compile them for H100s.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ultrascale_jax.kernels.attention_mask import PLAIN_SCORES, UNSEEN, BlockMask, Scores
from ultrascale_jax.kernels.attention_ranges import Ranges, ranges_of
from ultrascale_jax.kernels.device import match_vma
from ultrascale_jax.kernels.xla import compute_together

HALF = 64
"""Rows of a warpgroup, in queries or keys."""

TILE = 128
"""Queries or keys of a program; T and S are multiples of it."""

STAGES = 4
"""Half tiles loaded ahead in the backward pass: with the resident ones 193 of 227 KiB of shared memory."""

COMPUTE = 2
"""Warpgroups that compute; the one after them loads."""

LOG2_E = math.log2(math.e)
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
WGMMA = plgpu.Layout.WGMMA
ROWS, COLUMNS = WGMMA.reduce(1), WGMMA.reduce(0)
"""Layouts of one value a row, and one value a column, of an array in the layout of a product."""

BY_HEAD = ("lse", "delta")
"""Arrays `[B, N, T]`; the others are `[B, T, N, H]`."""


@dataclass(frozen=True, kw_only=True)
class Loads:
    """The arrays of a program in shared memory."""

    resident: list[str]
    """Inputs of which each warpgroup holds the rows of its half of the program's tile."""
    streamed: list[list[str]]
    """Groups of inputs whose visited tiles are loaded ahead; inputs of a group share barriers."""
    where: Callable
    """`where(program, step)` gives the first row of a step's tile, and the head."""
    rows: int = HALF
    """Rows of a visited tile."""
    stages: int = STAGES
    repeat: int = 1
    """Heads whose tiles the program visits."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other buffers."""

    def scratch(self, H: int) -> dict[str, Any]:
        """Return buffers by the inputs' names, and barriers."""

        def buffer(name: str, count: int, rows: int) -> Any:
            if name in BY_HEAD:
                return plgpu.SMEM((count, rows), jnp.float32)
            return _tiled((count, rows, H))

        def barriers(arrivals: int, count: int = self.stages) -> Any:
            return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)

        resident = {name: buffer(name, COMPUTE, HALF) for name in self.resident}
        streamed = {x: buffer(x, self.stages, self.rows) for group in self.streamed for x in group}
        return {
            "s": resident | streamed | self.extra,
            "loaded": barriers(len(self.resident), COMPUTE),
            "full": [barriers(len(group)) for group in self.streamed],
            "free": [barriers(COMPUTE) for _ in self.streamed],
            "turn": barriers(COMPUTE, 1),
        }


@dataclass(frozen=True)
class Program:
    """The work of one program: its arrays in global and in shared memory, by name."""

    batch: Any
    head: Any
    tile: Any
    first: Any
    count: Any
    """Number of visited tiles of each head."""
    g: dict[str, Any]
    s: dict[str, Any]
    full: list[Any]
    """For each group of arrays loaded together: barriers of its buffers, which complete on arrival."""
    free: list[Any]
    """Barriers that complete when the arrays have been read."""
    turn: Any

    def index(self, name: str, wg) -> tuple[Any, ...]:
        """Index a warpgroup's half of the program's tile in global memory."""
        return _index(name, self.batch, self.tile * TILE + wg * HALF, HALF, self.head)

    def inside(self, half) -> tuple[Any, Any]:
        """Return the keys that all queries of half a tile see."""
        return self.g["inside"][self.batch, half, 0], self.g["inside"][self.batch, half, 1]

    def take_turns(self) -> None:
        """Wait for the other warpgroup to come here."""
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.turn)


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: BlockMask,
    scores: Scores = PLAIN_SCORES,
    *,
    staged: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute `attention_forward`; a query that sees no key gets zeros, and a log-sum-exp of -1e30.

    With `staged` every operand of a product passes through shared memory, as the GPU interpreter needs it. Without, the
    weights stay in registers.

    Raises:
      ValueError: `scores` has a soft cap, or a scale that is not positive.
    """
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    divisor = _divisor(scores, H)
    q, k, v, ranges = match_vma(q, k, v, ranges_of(mask, B, T, S))
    stages = 256 // H
    staged_weights = {"p": _tiled((COMPUTE, HALF, TILE))} if staged else {}
    out, lse = _call(
        "attention",
        functools.partial(_attend, divisor=divisor, stages=stages),
        {"out": q, "lse": jax.ShapeDtypeStruct((B, N, T), jnp.float32)},
        {"q": q, "k": k, "v": v},
        ranges,
        _steps(ranges, TILE, TILE, S),
        Loads(
            resident=["q"],
            streamed=[["k"], ["v"]],
            where=lambda p, i: ((p.first + i) * TILE, lax.div(p.head, N // K)),
            rows=TILE,
            stages=stages,
            extra={"lse": plgpu.SMEM((COMPUTE, HALF), jnp.float32)} | staged_weights,
        ),
    )
    return out, lse


def _divisor(scores: Scores, head_dim: int) -> float:
    """Return the number by which q k^T is divided; refuse scores that the kernels do not compute."""
    divisor = scores.divisor(head_dim)
    if scores.softcap is not None or divisor <= 0:
        raise ValueError(f"scores={scores}: the kernel takes positive scales, and no soft cap")
    return divisor


def _attend(p: Program, wg, *, divisor: float, stages: int) -> None:
    """Compute half a tile of the result and its log-sum-exp."""
    H = p.s["q"].shape[2]
    scale = LOG2_E / divisor
    (k_full, v_full), (k_free, v_free) = p.full, p.free
    mask = _mask(p, 2 * p.tile + wg, (HALF, TILE))
    pl.when(p.count > 0)(lambda: plgpu.barrier_wait(k_full.at[0]))
    pl.when(wg == 1)(p.take_turns)

    def step(i, state):
        acc, largest, total = state
        slot = lax.rem(i, stages)

        def scores(scores_a):
            plgpu.wgmma(scores_a, p.s["q"].at[wg], p.s["k"].at[slot].transpose((1, 0)))
            p.take_turns()
            return scores_a[...]

        x = pl.run_scoped(scores, plgpu.ACC((HALF, TILE), jnp.float32))
        plgpu.barrier_arrive(k_free.at[slot])
        x = mask(x, (p.first + i) * TILE)
        weights, shrink, largest, total = _softmax(x, scale, largest, total)
        weights = _operand(p, "p", weights, wg)
        plgpu.barrier_arrive(p.turn)
        plgpu.barrier_wait(v_full.at[slot])
        plgpu.barrier_wait(p.turn)

        def weigh(weighted_a):
            plgpu.wgmma(weighted_a, weights, p.s["v"].at[slot])
            next_full = k_full.at[lax.rem(i + 1, stages)]
            pl.when(i + 1 < p.count)(lambda: plgpu.barrier_wait(next_full))
            return weighted_a[...]

        weighted = pl.run_scoped(weigh, plgpu.ACC((HALF, H), jnp.float32))
        plgpu.barrier_arrive(v_free.at[slot])
        return acc * _along(shrink, acc.shape, 0) + weighted, largest, total

    start = (
        plgpu.layout_cast(jnp.zeros((HALF, H), jnp.float32), WGMMA),
        plgpu.layout_cast(jnp.full((HALF,), UNSEEN, jnp.float32), ROWS),
        plgpu.layout_cast(jnp.zeros((HALF,), jnp.float32), ROWS),
    )
    acc, largest, total = lax.fori_loop(0, p.count, step, start)
    pl.when(wg == 0)(p.take_turns)
    total = jnp.where(total == 0, 1.0, total)
    out = (acc * _along(1 / total, acc.shape, 0)).astype(jnp.bfloat16)
    _store(p, wg, ("out", "q", out), ("lse", "lse", largest / LOG2_E + jnp.log(total)))


def _softmax(x, scale: float, largest, total) -> tuple:
    """Return the weights of scores, the factor of all weights before, and the largest score and sum of weights so far.

    All is done before the other warpgroup has its turn.
    """
    new = jnp.maximum(largest, x.max(axis=1) * scale)
    shrink = jnp.exp2(largest - new)
    weights = jnp.exp2(x * scale - _along(new, x.shape, 0))
    total = total * shrink + weights.sum(axis=1)
    results = weights.astype(jnp.bfloat16), total, shrink
    weights, total, shrink = compute_together(results)
    return weights, shrink, new, total


def backward(
    q, k, v, out, lse, dout, mask: BlockMask, scores: Scores = PLAIN_SCORES, *, staged: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute `attention_backward`; `staged` as given to `forward`."""
    divisor = _divisor(scores, q.shape[3])
    ranges = ranges_of(mask, q.shape[0], q.shape[1], k.shape[1])
    q, k, v, out, lse, dout, ranges = match_vma(q, k, v, out, lse, dout, ranges)
    delta = jnp.einsum("BTNH,BTNH->BNT", out, dout, preferred_element_type=jnp.float32)
    # The log-sum-exp to the base 2: a kernel has exp2.
    inputs = {"q": q, "k": k, "v": v, "do": dout, "lse": lse * LOG2_E, "delta": delta}
    dk, dv = _key_gradients(inputs, ranges, divisor, staged=staged)
    (dq,) = _query_gradients(inputs, ranges, divisor, staged=staged)
    return dq, dk, dv


def _key_gradients(
    inputs: dict[str, jax.Array], ranges: Ranges, divisor: float, *, staged: bool
) -> list[jax.Array]:
    """Return the gradients of keys and values."""
    group, half = inputs["q"].shape[2] // inputs["k"].shape[2], _tiled((COMPUTE, HALF, HALF))
    return _call(
        "attention_dkv",
        functools.partial(_pull_back_keys, divisor=divisor, group=group),
        {"dk": inputs["k"], "dv": inputs["v"]},
        inputs,
        ranges,
        _query_steps(ranges, inputs["k"].shape[1]),
        Loads(
            resident=["k", "v"],
            streamed=[["q", "do", "lse", "delta"]],
            where=lambda p, i: (
                (p.first + lax.rem(i, p.count)) * HALF,
                p.head * group + lax.div(i, p.count),
            ),
            repeat=group,
            extra={"p": half, "ds": half} if staged else {},
        ),
    )


def _query_gradients(
    inputs: dict[str, jax.Array], ranges: Ranges, divisor: float, *, staged: bool
) -> list[jax.Array]:
    """Return the gradient of queries alone."""
    group = inputs["q"].shape[2] // inputs["k"].shape[2]
    return _call(
        "attention_dq",
        functools.partial(_pull_back_queries, divisor=divisor),
        {"dq": inputs["q"]},
        inputs,
        ranges,
        _steps(ranges, TILE, HALF, inputs["k"].shape[1]),
        Loads(
            resident=["q", "do"],
            streamed=[["k", "v"]],
            where=lambda p, i: ((p.first + i) * HALF, lax.div(p.head, group)),
            extra={"ds": _tiled((COMPUTE, HALF, HALF))} if staged else {},
        ),
    )


def _pull_back_keys(p: Program, wg, *, divisor: float, group: int) -> None:
    """Compute gradients of half a tile of keys and values; scores are `[keys, queries]` here."""
    H = p.s["k"].shape[2]
    scale, key = 1 / divisor, p.tile * TILE + wg * HALF
    k_s, v_s = p.s["k"].at[wg], p.s["v"].at[wg]

    def gradients(dk_a, dv_a):
        def step(i, _):
            slot = lax.rem(i, STAGES)
            half = p.first + lax.rem(i, p.count)
            q_s, do_s = p.s["q"].at[slot], p.s["do"].at[slot]
            plgpu.barrier_wait(p.full[0].at[slot])
            x, dweights = _products((k_s, q_s), (v_s, do_s))
            x = _mask(p, half, x.shape, of_keys=True)(x, key)
            lse = plgpu.load(p.s["lse"].at[slot], layout=COLUMNS)
            weights = jnp.exp2(x * (scale * LOG2_E) - _along(lse, x.shape, 1))
            delta = plgpu.load(p.s["delta"].at[slot], layout=COLUMNS)
            dx = weights * (dweights - _along(delta, x.shape, 1))
            # Not before dx is there: while this runs, registers hold `weights` twice.
            plgpu.wgmma(dv_a, _operand(p, "p", weights.astype(jnp.bfloat16), wg), do_s)
            plgpu.wgmma(dk_a, _operand(p, "ds", dx.astype(jnp.bfloat16), wg), q_s)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(p.free[0].at[slot])

        lax.fori_loop(0, group * p.count, step, None)
        return (dk_a[...] * scale).astype(jnp.bfloat16), dv_a[...].astype(jnp.bfloat16)

    acc = plgpu.ACC((HALF, H), jnp.float32)
    dk, dv = pl.run_scoped(gradients, acc, acc)
    _store(p, wg, ("dk", "k", dk), ("dv", "v", dv))


def _pull_back_queries(p: Program, wg, *, divisor: float) -> None:
    """Compute the gradient of half a tile of queries."""
    H = p.s["q"].shape[2]
    scale = 1 / divisor
    q_s, do_s = p.s["q"].at[wg], p.s["do"].at[wg]
    lse, delta = (
        plgpu.load(p.g[name].at[p.index(name, wg)], layout=ROWS, optimized=False)
        for name in BY_HEAD
    )
    mask = _mask(p, 2 * p.tile + wg, (HALF, HALF))

    def gradient(dq_a):
        def step(i, _):
            slot = lax.rem(i, STAGES)
            k_s, v_s = p.s["k"].at[slot], p.s["v"].at[slot]
            plgpu.barrier_wait(p.full[0].at[slot])
            x, dweights = _products((q_s, k_s), (do_s, v_s))
            x = mask(x, (p.first + i) * HALF)
            weights = jnp.exp2(x * (scale * LOG2_E) - _along(lse, x.shape, 0))
            dx = weights * (dweights - _along(delta, x.shape, 0))
            plgpu.wgmma(dq_a, _operand(p, "ds", dx.astype(jnp.bfloat16), wg), k_s)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(p.free[0].at[slot])

        lax.fori_loop(0, p.count, step, None)
        return dq_a[...]

    dq = pl.run_scoped(gradient, plgpu.ACC((HALF, H), jnp.float32)) * scale
    _store(p, wg, ("dq", "q", dq.astype(jnp.bfloat16)))


def _steps(ranges: Ranges, queries: int, keys: int, S: int) -> jax.Array:
    """Return the tiles of keys that each tile of queries needs, `[B, T / queries, 2]`: the first, and the number."""
    start, end = _visible_range(ranges, queries, S)
    first = start // keys
    return jnp.stack([first, jnp.maximum(-(-end // keys) - first, 0)], axis=-1)


def _query_steps(ranges: Ranges, S: int) -> jax.Array:
    """Return the half tiles of queries that each tile of keys needs, `[B, S / 128, 2]`: the first, and the number."""
    start, end = _visible_range(ranges, HALF, S)
    key = jnp.arange(0, S, TILE, dtype=jnp.int32)[None, :, None]
    meet = (start[:, None] < key + TILE) & (end[:, None] > key)
    first = jnp.argmax(meet, axis=2)
    last = meet.shape[2] - jnp.argmax(meet[:, :, ::-1], axis=2)
    count = jnp.where(jnp.any(meet, axis=2), last - first, 0)
    return jnp.stack([first, count], axis=-1).astype(jnp.int32)


def _visible_range(ranges: Ranges, queries: int, S: int) -> tuple[jax.Array, jax.Array]:
    """Return the first key that any query of a tile sees, and the one after the last, `[B, T / queries]` both."""
    start, end = (x.reshape(x.shape[0], -1, queries) for x in ranges)
    sees = start < end
    return jnp.where(sees, start, S).min(2), jnp.where(sees, end, 0).max(2)


def _inside(ranges: Ranges) -> jax.Array:
    """Return the range of keys that all queries of half a tile see, `[B, T / 64, 2]`."""
    start, end = (x.reshape(x.shape[0], -1, HALF) for x in ranges)
    return jnp.stack([start.max(2), end.min(2)], axis=-1)


def _products(*pairs) -> tuple[jax.Array, ...]:
    """Return a b^T of each pair of half tiles."""

    def run(*accs):
        for acc, (a_s, b_s) in zip(accs, pairs, strict=True):
            plgpu.wgmma(acc, a_s, b_s.transpose((1, 0)))
        return tuple(acc[...] for acc in accs)

    return pl.run_scoped(run, *[plgpu.ACC((HALF, HALF), jnp.float32)] * len(pairs))


def _mask(p: Program, half, shape: tuple[int, ...], *, of_keys: bool = False) -> Callable:
    """Return `mask(scores, first key)`: -inf where half a tile of queries does not see; scores turned if `of_keys`."""
    keys, layout = (0, COLUMNS) if of_keys else (1, ROWS)
    first, end = p.inside(half)
    queries = p.batch, pl.ds(half * HALF, HALF)

    def bound(name):
        bounds = plgpu.load(p.g[name].at[queries], layout=layout, optimized=False)
        return _along(bounds, shape, 1 - keys)

    def mask(scores, key):
        def position():
            return plgpu.broadcasted_iota(jnp.int32, shape, keys, layout=WGMMA) + key

        def from_start(x):
            return jnp.where(position() >= bound("start"), x, -jnp.inf)

        def to_end(x):
            return jnp.where(position() < bound("end"), x, -jnp.inf)

        # Apart, since most tiles at an edge are at one, and since both bounds are many registers.
        scores = lax.cond(key >= first, lambda x: x, from_start, scores)
        return lax.cond(key + shape[keys] <= end, lambda x: x, to_end, scores)

    return mask


def _operand(p: Program, name: str, x, wg):
    """Return the left operand of a product: in registers, or in this warpgroup's part of a buffer if there is one."""
    if name not in p.s:
        return x
    p.s[name].at[wg][...] = x
    plgpu.commit_smem()
    return p.s[name].at[wg]


def _along(x, shape: tuple[int, ...], dim: int):
    """Broadcast `x` along the dim other than `dim`."""
    return lax.broadcast_in_dim(x, shape, [dim])


def _index(name: str, batch, start, size: int, head) -> tuple[Any, ...]:
    """Index the rows of one head in global memory."""
    rows = pl.ds(start, size)
    return (batch, head, rows) if name in BY_HEAD else (batch, rows, head)


def _store(p: Program, wg, *results: tuple[str, str, Any]) -> None:
    """Copy this warpgroup's values to global memory: (name there, buffer that they pass through, value)."""
    for _, buffer, value in results:
        p.s[buffer].at[wg][...] = value
    plgpu.commit_smem()
    for name, buffer, _ in results:
        plgpu.copy_smem_to_gmem(p.s[buffer].at[wg], p.g[name].at[p.index(name, wg)])
    plgpu.wait_smem_to_gmem(0)


def _tiled(shape: tuple[int, ...]) -> Any:
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=TILED)


def _call(
    name: str,
    compute: Callable,
    out: dict[str, Any],
    inputs: dict[str, jax.Array],
    ranges: Ranges,
    steps: jax.Array,
    loads: Loads,
) -> list[jax.Array]:
    """Run a kernel with a program for each tile and head of the first of `out`; the results vary as the operands do.

    Args:
      compute: `compute(program, warpgroup)` computes half a tile of the results.
      steps: `[B, tiles, 2]` int32: the first of the tiles that a program visits, and how many.
    """
    operands = {"steps": steps, "inside": _inside(ranges), **ranges._asdict(), **inputs}
    names = [*operands, *out]
    B, size, heads, H = next(iter(out.values())).shape

    def body(*refs, s, loaded, full, free, turn):
        batch, tile, head = (lax.axis_index(axis) for axis in ("batch", "tile", "head"))
        # With a causal mask the last queries and the first keys have the most to do.
        tile = size // TILE - 1 - tile if "q" in loads.resident else tile
        g = dict(zip(names, refs, strict=True))
        first, count = g["steps"][batch, tile, 0], g["steps"][batch, tile, 1]
        program = Program(batch, head, tile, first, count, g, s, full, free, turn)
        _run(program, loads, loaded, compute)

    results = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out.values()],
        scratch_types=loads.scratch(H),
        grid=(B, size // TILE, heads),
        grid_names=("batch", "tile", "head"),
        num_threads=COMPUTE + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
    )(*operands.values())
    return match_vma(*results, *operands.values())[: len(out)]


def _run(p: Program, loads: Loads, loaded: Any, compute: Callable) -> None:
    """Load the resident rows of both computing warpgroups, and let them compute while the third one loads ahead."""
    wg = lax.axis_index("wg")

    @pl.when(wg < COMPUTE)
    def _():
        plgpu.set_max_registers(232, action="increase")
        for x in loads.resident:
            plgpu.copy_gmem_to_smem(p.g[x].at[p.index(x, wg)], p.s[x].at[wg], loaded.at[wg])
        plgpu.barrier_wait(loaded.at[wg])
        compute(p, wg)

    @pl.when(wg == COMPUTE)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        _load_ahead(p, loads)


def _load_ahead(p: Program, loads: Loads) -> None:
    """Load each step's tiles as soon as their buffers have been read."""
    count, stages = loads.repeat * p.count, loads.stages

    def load(names, full, i):
        start, head = loads.where(p, i)
        slot = lax.rem(i, stages)
        for x in names:
            source = p.g[x].at[_index(x, p.batch, start, loads.rows, head)]
            plgpu.copy_gmem_to_smem(source, p.s[x].at[slot], full.at[slot])

    # The last steps only wait: a barrier that still changes must not be left so.
    @pl.loop(0, count + stages)
    def _(i):
        for names, full, free in zip(loads.streamed, p.full, p.free, strict=True):
            slot = lax.rem(i, stages)
            pl.when(i >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
            pl.when(i < count)(functools.partial(load, names, full, i))
