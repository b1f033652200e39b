"""Fuse output head and cross-entropy without the logits in memory, for the full vocabulary or a shard of it.

A loss needs two numbers of each token: the log-sum-exp of its logits, and the logit of its target. The forward pass
computes them a chunk of tokens at a time, or by a kernel that holds no logits (`linear_cross_entropy_mosaic.py`). The
backward pass computes the logits again, and their gradient for a chunk of the vocabulary at a time, which two
plain products take. A run's other implementation, `models/loss.py`, computes the gradients in the forward pass by
chunks of tokens: three products, not four.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ultrascale_jax.kernels.device import match_vma, takes_mosaic

CHUNK_BYTES = 2**28
"""Upper bound of a chunk's logits, and of their gradients."""

TILE = 128, 256, 64
"""Tokens, words and elements of d_model that a warpgroup pair of the kernels takes at once."""

LOWEST = -1e30
"""Logit of a column that is no word."""

ALIGNED = 32
"""The kernels' vocabulary is a multiple of it: TMA swizzles parts of rows of 64 or 128 bytes that divide the row."""


def linear_cross_entropy(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    weight: jax.Array | float = 1.0,
    z_loss: float = 0.0,
    offset: jax.Array | int | None = None,
    vocab_size: int | None = None,
    axes: Sequence[str] = (),
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sum of the negative log-likelihoods of `targets`; differentiable in `x` and `head`.

    Where a mesh splits x or head, call it in `jax.shard_map`, on this device's shards.

    Args:
      x: `[..., D]` hidden states.
      head: `[D, V]` in x's type; with `axes` this device's words.
      targets: `[...]` integers, token ids; -1 is not counted. An id outside the vocabulary turns the loss into NaN.
      weight: weight of each counted token, a scalar or `[...]`; 1 / number of tokens gives the mean.
      z_loss: adds `z_loss * logsumexp(logits)^2` for each counted token (arXiv 2204.02311, section 5).
      offset: number of the first word of `head`; by default that of equal shards over `axes`, in their order.
      vocab_size: columns of the full head that are words; the others pad it. None: all.
      axes: mesh axes over which the vocabulary is split, in a region that is manual over them.
      implementation: `xla`, `mosaic` (bfloat16, a multiple of 128 tokens, D of 64, V of 32, on a Hopper GPU; a forced
        one fails loudly), or `auto`, as `choices.py` has it.

    Returns:
      The objective (with z-loss) and the bare cross-entropy, scalars in float32, or of float64 in float64; sums over
      the tokens that are here.

    Raises:
      ValueError: shapes or types do not fit, the implementation is unknown, or the kernels cannot run here.
    """
    _check(x, head, targets, weight)
    _check_axes(head, axes)
    axes, (D, V) = tuple(axes), head.shape
    if offset is None:
        offset = lax.axis_index(axes) * V if axes else 0
    x, targets = x.reshape(-1, D), _as_int32(targets).reshape(-1)
    weight = jnp.reshape(weight, -1) if jnp.ndim(weight) else weight
    fused = _takes_kernels(implementation, x, head)
    vocab_size = V * lax.axis_size(axes) if vocab_size is None else vocab_size
    # A target that does not count, or is no word of this shard, hits no column.
    columns = jnp.where(targets >= 0, targets - offset, -1)
    words = jnp.clip(jnp.int32(vocab_size - offset), 0, V)
    lse, target_logit = statistics(fused, *match_vma(x, head, columns, words))
    if axes:
        lse, target_logit = _over_shards(lse, target_logit, axes)
    is_word = (targets >= -1) & (targets < vocab_size)
    weights = jnp.where(is_word, jnp.where(targets >= 0, weight, 0.0), jnp.nan)
    loss = jnp.sum(weights * (lse - target_logit))
    return loss + z_loss * jnp.sum(weights * jnp.square(lse)), loss


def _over_shards(
    lse: jax.Array, target_logit: jax.Array, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return log-sum-exps and targets' logits over the full vocabulary, from those of its shards."""
    highest = lax.pmax(lax.stop_gradient(lse), axes)
    total, target_logit = lax.psum((jnp.exp(lse - highest), target_logit), axes)
    return highest + jnp.log(total), target_logit


def _takes_kernels(implementation: str, x: jax.Array, head: jax.Array) -> bool:
    """Return whether the kernels multiply x `[M, D]` by the head."""
    M, (D, V), (rows, _, depth) = len(x), head.shape, TILE
    needs = {
        "bfloat16": x.dtype == head.dtype == jnp.bfloat16,
        f"M in multiples of {rows}": M % rows == 0,
        f"D in multiples of {depth}": D % depth == 0,
        f"V in multiples of {ALIGNED}": V % ALIGNED == 0,
    }
    got = f"{x.dtype} and {head.dtype}, M={M}, D={D}, V={V}"
    return takes_mosaic("loss", implementation, needs, got)


def _as_int32(targets: jax.Array) -> jax.Array:
    """Return targets of any integers as int32; one beyond its range stays one that is no word."""
    if targets.dtype == jnp.int32:
        return targets
    limits = jnp.iinfo(targets.dtype)
    lowest, highest = max(limits.min, -2), min(limits.max, jnp.iinfo(jnp.int32).max)
    return jnp.clip(targets, lowest, highest).astype(jnp.int32)


def _check(x: jax.Array, head: jax.Array, targets: jax.Array, weight: jax.Array | float) -> None:
    """Refuse arrays of which the loss would be nonsense."""
    if x.ndim == 0 or head.ndim != 2 or x.shape[-1] != head.shape[0]:
        raise ValueError(
            f"x={x.shape} and head={head.shape}: must be hidden states [..., D] and a head [D, V]"
        )
    if targets.shape != x.shape[:-1]:
        raise ValueError(f"targets={targets.shape}: must have the shape {x.shape[:-1]} of x")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets={targets.dtype}: must be integers, the numbers of words")
    if jnp.shape(weight) not in ((), targets.shape):
        raise ValueError(
            f"weight={jnp.shape(weight)}: must be a scalar, or have the shape {targets.shape} of targets"
        )


def _check_axes(head: jax.Array, axes: Sequence[str]) -> None:
    """Refuse axes that are not manual here, or over which the head is the same on all devices."""
    if isinstance(axes, str) or not isinstance(axes, Sequence):
        raise ValueError(f"axes={axes!r}: must be a list of mesh axes, in the order that splits V")
    manual = jax.sharding.get_abstract_mesh().manual_axes
    for axis in axes:
        if axis not in manual:
            raise ValueError(
                f"axes={axes!r}: {axis!r} is not manual here; call this inside jax.shard_map over the axes that split V"
            )
        tracked = axis in jax.typeof(lax.axis_index(axis)).mat.varying
        if tracked and lax.axis_size(axis) > 1 and axis not in jax.typeof(head).mat.varying:
            raise ValueError(
                f"axes={axes!r}: head is the same over {axis!r}; split its V over it, or leave the axis out"
            )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def statistics(
    fused: bool, x: jax.Array, head: jax.Array, columns: jax.Array, words: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return each token's log-sum-exp, and its target's logit (0 if that is no column), `[M]` float32 both.

    `fused` takes the kernels, the others are XLA's. The first `words` columns count, an int32 scalar.
    """
    return _forward(fused, x, head, columns, words)[0]


def _forward(fused, x, head, columns, words):
    if fused:
        from ultrascale_jax.kernels import linear_cross_entropy_mosaic as mosaic

        results = mosaic.statistics(x, head, columns, words)
    else:
        results = reference_statistics(x, head, columns, words)
    return results, (x, head, columns, words, results[0])


def reference_statistics(
    x: jax.Array, head: jax.Array, columns: jax.Array, words: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Compute `statistics` by XLA, a chunk of tokens at a time."""

    def chunk(x, columns):
        logits, hits = _logits(x, head, columns, words)
        return jax.nn.logsumexp(logits, axis=-1), jnp.sum(jnp.where(hits, logits, 0.0), axis=-1)

    tokens = max(1, CHUNK_BYTES // (4 * head.shape[1]))
    if len(x) <= tokens:
        return chunk(x, columns)
    return lax.map(lambda token: chunk(*token), (x, columns), batch_size=tokens)


def _logits(
    x: jax.Array, head: jax.Array, columns: jax.Array, words: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return logits in float32, `[..., V]`, `LOWEST` from column `words` on, and which of them are the targets'."""
    accumulated = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.einsum("...D,DV->...V", x, head, preferred_element_type=accumulated)
    numbers = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(numbers < words, logits, LOWEST), numbers == columns[..., None]


def reference_gradient(x, head, columns, words, lse, d_lse, d_target, start, width) -> jax.Array:
    """Return the gradient of the logits of `width` words from `start`, `[M, width]` in x's type, by XLA."""
    head = lax.dynamic_slice_in_dim(head, start, width, axis=1)
    logits, hits = _logits(x, head, columns - start, words - start)
    softmax = jnp.exp(logits - lse[:, None])
    return (d_lse[:, None] * softmax + jnp.where(hits, d_target[:, None], 0.0)).astype(x.dtype)


def _backward(fused, residuals, cotangents):
    """Return the gradients of x and head, a chunk of the vocabulary at a time."""
    x, head, columns, words, lse = residuals
    d_lse, d_target = cotangents
    (M, D), V = x.shape, head.shape[1]
    chunks = math.ceil(M * V * x.dtype.itemsize / CHUNK_BYTES)
    _, tile, _ = TILE
    width = min(V, tile * math.ceil(V / (chunks * tile)))
    gradient = reference_gradient
    if fused:
        from ultrascale_jax.kernels import linear_cross_entropy_mosaic as mosaic

        gradient = mosaic.gradient

    def visit(start, width, gradients):
        dx, dhead = gradients
        dlogits = gradient(x, head, columns, words, lse, d_lse, d_target, start, width)
        head_part = lax.dynamic_slice_in_dim(head, start, width, axis=1)
        dx += jnp.einsum("MV,DV->MD", dlogits, head_part, preferred_element_type=dx.dtype)
        dhead_part = jnp.einsum("MD,MV->DV", x, dlogits)
        return dx, lax.dynamic_update_slice_in_dim(dhead, dhead_part, start, axis=1)

    zeros = jnp.zeros((M, D), jnp.promote_types(x.dtype, jnp.float32)), jnp.zeros_like(head)
    gradients = tuple(match_vma(*zeros, x)[:2])
    whole_chunks, last_width = divmod(V, width)
    if whole_chunks:
        gradients = lax.fori_loop(
            0, whole_chunks, lambda n, gradients: visit(n * width, width, gradients), gradients
        )
    if last_width:
        gradients = visit(jnp.int32(whole_chunks * width), last_width, gradients)
    dx, dhead = gradients
    return dx.astype(x.dtype), dhead, None, None


statistics.defvjp(_forward, _backward)
