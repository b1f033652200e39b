"""Fuse output head and cross-entropy without the logits in memory, for the whole vocabulary or a piece of it.

The forward pass keeps each token's log-sum-exp. The backward pass computes the logits again, for a chunk of the
vocabulary at a time, and from them their gradient in the inputs' type, which two plain products take: so what it holds
at once does not grow with the vocabulary. The kernels (`linear_cross_entropy_mosaic.py`) hold no logits at all. In
`models/loss.py` the gradients are made in the forward pass, for a chunk of tokens at a time: three products, not four.
"""

import functools
import math
from collections.abc import Collection

import jax
import jax.numpy as jnp
from jax import lax

from ultrascale_jax.kernels import linear_cross_entropy_mosaic as mosaic
from ultrascale_jax.kernels.device import choose, match_vma

CHUNK_BYTES = 2**28
"""Upper bound of one chunk's logits in float32; with the kernels, of their gradients."""


def linear_cross_entropy(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    weight: jax.Array,
    z_loss: float = 0.0,
    offset: jax.Array | int = 0,
    axes: Collection[str] = (),
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sum of the negative log-likelihoods of `targets`; differentiable in `x` and `head`.

    Args:
      x: `[M, D]` hidden states.
      head: `[D, V]` in x's type; with `axes` this device's words.
      targets: `[M]` int32 numbers of words; -1 is not counted. One that is no word makes the loss NaN.
      weight: float32 scalar, the weight of each counted token; 1 / number of tokens gives the mean.
      z_loss: adds `z_loss * logsumexp(logits)^2` for each counted token (arXiv 2204.02311, section 5).
      offset: number of the first word of `head`.
      axes: mesh axes over which the vocabulary is split, in a region that is manual over them.
      implementation: `xla`, `mosaic` (bfloat16, M a multiple of 128, D of 64, V of 32, on a Hopper GPU; a forced one
        fails loudly), or `auto`, as `choices.py` has it.

    Returns:
      The objective (with z-loss) and the bare cross-entropy, float32 scalars; sums over the tokens that are here.

    Raises:
      ValueError: the implementation is unknown, or the kernels cannot run here or on these shapes.
    """
    (M, D), V = x.shape, head.shape[1]
    fused = choose(
        implementation,
        fits=mosaic.takes(M, D, V) and x.dtype == head.dtype == jnp.bfloat16,
        needs=f"bfloat16, M in multiples of {mosaic.ROWS}, D of {mosaic.DEPTH} and V of {mosaic.ALIGNED}",
        got=f"{x.dtype} and {head.dtype}, M={M}, D={D}, V={V}",
        field="loss",
    )
    # A target that does not count, or is no word of this piece, hits no column.
    columns = jnp.where(targets >= 0, targets - offset, -1)
    counted = jnp.where(targets >= 0, weight, 0.0)
    is_word = (targets >= -1) & (targets < V * lax.axis_size(tuple(axes)))
    counted = jnp.where(is_word, counted, jnp.nan)
    arrays = match_vma(x, head, columns)
    return _cross_entropy(*arrays, counted, z_loss, tuple(sorted(axes)), fused)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _cross_entropy(x, head, columns, counted, z_loss: float, axes: tuple[str, ...], fused: bool):
    """Compute `linear_cross_entropy` of targets as columns of `head`, with each token's weight."""
    return _forward(x, head, columns, counted, z_loss, axes, fused)[0]


def _forward(x, head, columns, counted, z_loss, axes, fused):
    statistics = mosaic.statistics if fused else _statistics
    lse, gold = statistics(x, head, columns)
    if axes:
        highest = lax.pmax(lse, axes)
        total, gold = lax.psum((jnp.exp(lse - highest), gold), axes)
        lse = highest + jnp.log(total)
    loss = jnp.sum(counted * (lse - gold))
    objective = loss + z_loss * jnp.sum(counted * jnp.square(lse))
    return (objective, loss), (x, head, columns, counted, lse)


def _backward(z_loss, axes, fused, saved, g):
    x, head, columns, counted, lse = saved
    gold_scale = counted * (g[0] + g[1])
    scale = gold_scale + counted * g[0] * 2 * z_loss * lse
    lse, scale, gold_scale, _ = match_vma(lse, scale, gold_scale, x)
    dx, dhead = _gradients(x, head, columns, lse, scale, gold_scale, fused)
    return dx.astype(x.dtype), dhead, None, None


_cross_entropy.defvjp(_forward, _backward)


def _statistics(x: jax.Array, head: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return each token's log-sum-exp, and its target's logit (0 if that is no column), a chunk of tokens at a time."""
    rows = max(CHUNK_BYTES // (4 * head.shape[1]), 1)

    def token(inputs):
        x_D, column = inputs
        logits_1V = _logits(x_D[None], head)
        gold = jnp.sum(jnp.where(_hits(logits_1V, column[None]), logits_1V, 0.0))
        return jax.nn.logsumexp(logits_1V), gold

    return lax.map(token, (x, columns), batch_size=rows)


def _gradients(x, head, columns, lse, scale, gold_scale, fused: bool) -> tuple:
    """Return gradients of x, float32, and head, a chunk of the vocabulary at a time."""
    (M, D), V = x.shape, head.shape[1]
    count = math.ceil(M * V * (x.dtype.itemsize if fused else 4) / CHUNK_BYTES)
    width = mosaic.WIDTH * math.ceil(V / (count * mosaic.WIDTH))

    def visit(start, width, dx, dhead):
        part = lax.dynamic_slice_in_dim(head, start, width, axis=1)
        if fused:
            d = mosaic.gradient(x, head, columns, lse, scale, gold_scale, start, width)
        else:
            logits = _logits(x, part)
            d = jnp.exp(logits - lse[:, None]) * scale[:, None]
            d -= jnp.where(_hits(logits, columns - start), gold_scale[:, None], 0.0)
            d = d.astype(x.dtype)
        dx += jnp.einsum("MV,DV->MD", d, part, preferred_element_type=jnp.float32)
        more = jnp.einsum("MD,MV->DV", x, d)
        return dx, lax.dynamic_update_slice_in_dim(dhead, more, start, axis=1)

    zeros = jnp.zeros((M, D), jnp.float32), jnp.zeros_like(head)
    state = tuple(match_vma(*zeros, x)[:2])
    whole, rest = divmod(V, width)
    if whole:
        state = lax.fori_loop(0, whole, lambda n, state: visit(n * width, width, *state), state)
    return visit(jnp.int32(whole * width), rest, *state) if rest else state


def _logits(x: jax.Array, head: jax.Array) -> jax.Array:
    return jnp.einsum("MD,DV->MV", x, head, preferred_element_type=jnp.float32)


def _hits(logits: jax.Array, columns: jax.Array) -> jax.Array:
    """Return a mask of each token's target."""
    return lax.broadcasted_iota(jnp.int32, logits.shape, 1) == columns[:, None]
