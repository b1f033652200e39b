"""A causal depthwise convolution of a few taps, over a sequence that ranks of cp share and that holds documents.

A token's result needs the tokens just before it. Each rank sends the last ones of its stretches to all others, some
kilobytes, and takes those before its own: that is exact in any order of `sharding/sequence_order.py`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ultrascale_jax.config import ContextConfig, require
from ultrascale_jax.kernels.device import match_vma
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.rules import act, mesh_size, specs
from ultrascale_jax.sharding.sequence_order import stretches


def short_convolution(
    x: jax.Array,
    taps: jax.Array,
    dims: str,
    segment_ids_BT: jax.Array | None,
    context: ContextConfig,
    previous: jax.Array | None = None,
    bias: jax.Array | None = None,
    then: Callable[[jax.Array], jax.Array] = lambda y: y,
) -> jax.Array:
    """Return `then(y)`, `y_t = sum_o taps[.., o] x_(t - O + 1 + o)` float32, each document as if it stood alone.

    The backward pass keeps x and computes the rest again.

    Args:
      x: an activation of heads; `dims` are its letters, as BTKH.
      taps: `[K, H, O]`.
      dims: letters of x and of the result.
      segment_ids_BT: the document of each token, or None for one a row.
      context: the order of the sequence, where cp shards it.
      previous: the O - 1 tokens in front of x, where cp does not split it; without them there are none.
      bias: `[K, H]`, added to the sums.
      then: a function of each token, such as silu, made of its float32 sums.
    """

    def run(x, taps, segments, previous, bias):
        x, taps, segments, previous, bias = match_vma(x, taps, segments, previous, bias)
        if previous is not None:
            return _convolve(then, x, taps, bias, previous, None, None)
        halo = taps.shape[-1] - 1
        bounds, preceding = _preceding(x.shape[1], context, halo)
        sides = zip(*(_halos(a, halo, bounds, preceding) for a in (x, segments)), strict=True)
        parts = []
        for (start, stop), (x_before, ids_before) in zip(bounds, sides, strict=True):
            ids = None if segments is None else segments[:, start:stop]
            parts.append(_convolve(then, x[:, start:stop], taps, bias, x_before, ids, ids_before))
        return jnp.concatenate(parts, axis=1)

    operands = x, taps, segment_ids_BT, previous, bias
    return smap(run, in_specs=specs(operands), out_specs=act(dims))(*operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(
    then: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    taps: jax.Array,
    bias: jax.Array | None,
    previous: jax.Array,
    ids: jax.Array | None,
    ids_before: jax.Array | None,
) -> jax.Array:
    """Convolve one stretch `[B, T, K, H]`; `previous` are the O - 1 tokens in front of it.

    `ids` `[B, T]` and `ids_before` are the documents: a token of another one counts as zero.
    """
    joined, length = jnp.concatenate([previous, x], axis=1), x.shape[1]
    total = jnp.zeros_like(x, jnp.float32)
    for tap in range(taps.shape[-1]):
        part = joined[:, tap : tap + length].astype(jnp.float32) * taps[None, None, :, :, tap]
        if ids is not None and ids_before is not None:
            same = jnp.concatenate([ids_before, ids], axis=1)[:, tap : tap + length] == ids
            part = jnp.where(same[:, :, None, None], part, 0)
        total += part
    return then(total if bias is None else total + bias[None, None])


def _forward(then, *arrays):
    return _convolve(then, *arrays), arrays


def _backward(then, arrays, gradient):
    *arrays, ids, ids_before = arrays

    def again(*arrays):
        return _convolve.fun(then, *arrays, ids, ids_before)

    return *jax.vjp(again, *arrays)[1](gradient), None, None


_convolve.defvjp(_forward, _backward)


type Bounds = list[tuple[int, int]]
"""First place of each stretch of a rank, and the one after its last."""


def _preceding(tokens: int, context: ContextConfig, halo: int) -> tuple[Bounds, np.ndarray]:
    """Return the stretches of a rank, and for each rank and stretch the number of the stretch before it, or -1.

    Stretches are numbered rank after rank.
    """
    ranks = mesh_size("cp")
    bounds, numbers = stretches(tokens, ranks, context)
    shortest = min(stop - start for start, stop in bounds)
    fix = f"a stretch of a rank of mesh.cp={ranks} has {shortest} tokens, and the convolution reaches back {halo}; "
    fix += "use longer sequences or fewer ranks"
    require(ranks == 1 or shortest >= halo, "data.seq_len", tokens * ranks, fix)
    in_sequence = [-1, *np.argsort(numbers, axis=None).tolist()]
    return bounds, np.array(in_sequence, np.int32)[numbers]


def _halos(
    x: jax.Array | None, halo: int, bounds: Bounds, preceding: np.ndarray
) -> list[jax.Array | None]:
    """Return the tokens before each stretch of this rank `[B, O - 1, ...]`, zeros before the sequence."""
    if x is None:
        return [None] * len(bounds)
    if len(preceding) == 1:
        return [jnp.zeros_like(x[:, :1], shape=(x.shape[0], halo, *x.shape[2:]))]
    ends = jnp.stack([x[:, stop - halo : stop] for _, stop in bounds])
    ends = jax.lax.all_gather(ends, "cp", axis=0, tiled=True)
    numbers = jnp.asarray(preceding)[jax.lax.axis_index("cp")]
    return [
        jnp.where(number >= 0, ends[jnp.maximum(number, 0)], jnp.zeros_like(ends[0]))
        for number in numbers
    ]
