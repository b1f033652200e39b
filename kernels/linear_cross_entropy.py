"""Fuse output head and cross-entropy without the logits in memory, for the whole vocabulary or a shard of it.

A loss needs two numbers of each token: the log-sum-exp of its logits, and the logit of its target. The reference makes
all logits. The kernels (`linear_cross_entropy_mosaic.py`) hold none: the backward pass computes them again, and writes
their gradient for a chunk of the vocabulary at a time, which two plain products take. A run's other implementation,
`models/loss.py`, makes the gradients in the forward pass by chunks of tokens: three products, not four.
"""

import math
from collections.abc import Collection

import jax
import jax.numpy as jnp
from jax import lax

from ultrascale_jax.kernels import linear_cross_entropy_mosaic as mosaic
from ultrascale_jax.kernels.device import match_vma, takes_mosaic

CHUNK_BYTES = 2**28
"""Upper bound of the gradients of a chunk's logits."""


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
    needs = {
        "bfloat16": x.dtype == head.dtype == jnp.bfloat16,
        f"M in multiples of {mosaic.ROWS}": M % mosaic.ROWS == 0,
        f"D in multiples of {mosaic.DEPTH}": D % mosaic.DEPTH == 0,
        f"V in multiples of {mosaic.ALIGNED}": V % mosaic.ALIGNED == 0,
    }
    got = f"{x.dtype} and {head.dtype}, M={M}, D={D}, V={V}"
    fused = takes_mosaic("loss", implementation, needs, got)
    # A target that does not count, or is no word of this shard, hits no column.
    columns = jnp.where(targets >= 0, targets - offset, -1)
    statistics = fused_statistics if fused else reference_statistics
    lse, target_logit = statistics(*match_vma(x, head, columns))
    if axes:
        axes = tuple(sorted(axes))
        highest = lax.pmax(lax.stop_gradient(lse), axes)
        total, target_logit = lax.psum((jnp.exp(lse - highest), target_logit), axes)
        lse = highest + jnp.log(total)
    is_word = (targets >= -1) & (targets < V * lax.axis_size(tuple(axes)))
    weights = jnp.where(is_word, jnp.where(targets >= 0, weight, 0.0), jnp.nan)
    loss = jnp.sum(weights * (lse - target_logit))
    return loss + z_loss * jnp.sum(weights * jnp.square(lse)), loss


def reference_statistics(
    x: jax.Array, head: jax.Array, columns: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return each token's log-sum-exp, and its target's logit (0 if that is no column), `[M]` float32 both."""
    logits = jnp.einsum("MD,DV->MV", x, head, preferred_element_type=jnp.float32)
    hits = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == columns[:, None]
    return jax.nn.logsumexp(logits, axis=1), jnp.sum(jnp.where(hits, logits, 0.0), axis=1)


@jax.custom_vjp
def fused_statistics(
    x: jax.Array, head: jax.Array, columns: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Compute `reference_statistics` by the kernels."""
    return mosaic.statistics(x, head, columns)


def _forward(x, head, columns):
    lse, target_logit = mosaic.statistics(x, head, columns)
    return (lse, target_logit), (x, head, columns, lse)


def _backward(residuals, cotangents):
    """Return the gradients of x and head, a chunk of the vocabulary at a time."""
    x, head, columns, lse = residuals
    d_lse, d_target = cotangents
    (M, D), V = x.shape, head.shape[1]
    chunks = math.ceil(M * V * x.dtype.itemsize / CHUNK_BYTES)
    width = mosaic.WIDTH * math.ceil(V / (chunks * mosaic.WIDTH))

    def visit(start, width, gradients):
        dx, dhead = gradients
        dlogits = mosaic.gradient(x, head, columns, lse, d_lse, d_target, start, width)
        head_part = lax.dynamic_slice_in_dim(head, start, width, axis=1)
        dx += jnp.einsum("MV,DV->MD", dlogits, head_part, preferred_element_type=jnp.float32)
        dhead_part = jnp.einsum("MD,MV->DV", x, dlogits)
        return dx, lax.dynamic_update_slice_in_dim(dhead, dhead_part, start, axis=1)

    zeros = jnp.zeros((M, D), jnp.float32), jnp.zeros_like(head)
    gradients = tuple(match_vma(*zeros, x)[:2])
    whole_chunks, last_width = divmod(V, width)
    if whole_chunks:
        gradients = lax.fori_loop(
            0, whole_chunks, lambda n, gradients: visit(n * width, width, gradients), gradients
        )
    if last_width:
        gradients = visit(jnp.int32(whole_chunks * width), last_width, gradients)
    dx, dhead = gradients
    return dx.astype(x.dtype), dhead, None


fused_statistics.defvjp(_forward, _backward)
