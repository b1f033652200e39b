"""Vocabulary-parallel cross-entropy that never holds the logits: chunks of tokens, gradients made on the way.

For each chunk the logits, the loss and the gradients of hidden states and head are computed in one visit, so the
backward pass has nothing to recompute and the largest buffer is one chunk of logits. The chunks take every n-th
position, which leaves a sequence that is split over cp where it is.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from ultrascale_jax.kernels.linear_cross_entropy import linear_cross_entropy
from ultrascale_jax.sharding.manual import leave_partial, smap
from ultrascale_jax.sharding.primitives import all_reduce, offset, piece
from ultrascale_jax.sharding.rules import act, axes_of, gradient_axes, specs, vary, varying

CHUNK_BYTES = 2**31
"""Upper bound of one chunk's float32 logits on a device."""


def num_chunks(batch: int, seq_len: int, vocab_size: int) -> int:
    """Return the smallest number of chunks, a divisor of a device's sequence, whose logits stay below `CHUNK_BYTES`."""
    rows, length = max(piece("B", batch), 1), piece("T", seq_len)
    total = rows * length * piece("V", vocab_size) * 4
    return next(
        (n for n in range(1, length + 1) if length % n == 0 and total <= n * CHUNK_BYTES), length
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    weight: jax.Array,
    z_loss: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Sum the weighted negative log-likelihoods of `targets_BT`; differentiable in `x_BTD` and `head_DV`.

    Args:
      x_BTD: hidden states, `reduced` over the axes of V (`gather_sequence`).
      head_DV: output head, in the type of compute.
      targets_BT: token ids; -1 is not counted.
      weight: float32 scalar, the weight of each counted token; 1 / number of tokens gives the mean.
      z_loss: adds `z_loss * logsumexp(logits)^2` for each counted token (arXiv 2204.02311, section 5).

    Returns:
      The objective (with z-loss) and the bare cross-entropy, float32 scalars; in a manual region the sums over this
      device's part of the batch and the sequence.
    """
    _, (nll, z) = _scan(x_BTD, head_DV, targets_BT, weight, z_loss, with_gradients=False)
    return weight * jnp.sum(nll + z), weight * jnp.sum(nll)


def row_losses(
    x_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sum the negative log-likelihoods of each row's targets; arguments as of `cross_entropy`.

    Returns:
      The sums, float32 `[B]`, and whether no token is likelier than a target anywhere in the row, bool `[B]`.
    """
    weight = jnp.float32(1.0)
    (best, _), (nll, _) = _scan(x_BTD, head_DV, targets_BT, weight, 0.0, with_gradients=False)
    over = 1 if nll.ndim == 2 else (0, 2)
    return jnp.sum(nll, axis=over), jnp.all(best, axis=over)


@jax.custom_vjp
def token_losses(x_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Return the negative log-likelihood of each target, float32 `[B, T]`, 0 where the target is -1.

    Differentiable as `cross_entropy` is, whose arguments these are, by any function of the losses; the backward pass
    makes the logits again.
    """
    weight = jnp.float32(1.0)
    _, (nll, _) = _scan(x_BTD, head_DV, targets_BT, weight, 0.0, with_gradients=False)
    if nll.ndim == 2:
        return nll
    return jax.lax.reshape(jnp.moveaxis(nll, 0, 2), targets_BT.shape, out_sharding=act("BT"))


def _token_losses_forward(x_BTD, head_DV, targets_BT):
    return token_losses(x_BTD, head_DV, targets_BT), (x_BTD, head_DV, targets_BT)


def _token_losses_backward(kept, g_BT):
    x_BTD, head_DV, targets_BT = kept
    (dx, dhead), _ = _scan(x_BTD, head_DV, targets_BT, g_BT, 0.0, with_gradients=True)
    return dx, dhead, None


token_losses.defvjp(_token_losses_forward, _token_losses_backward)


def _forward(x_BTD, head_DV, targets_BT, weight, z_loss):
    x_BTD, head_DV, targets_BT, weight = (v.value for v in (x_BTD, head_DV, targets_BT, weight))
    gradients, (nll, z) = _scan(x_BTD, head_DV, targets_BT, weight, z_loss, with_gradients=True)
    losses = weight * jnp.sum(nll + z), weight * jnp.sum(nll)
    return losses, (gradients, (x_BTD, head_DV, targets_BT, weight))


def _backward(z_loss, kept, g):
    """Scale the objective's gradients, made on the way; make those of the bare loss here, if it has a cotangent."""
    gradients, (x_BTD, head_DV, targets_BT, weight) = kept
    found = []
    if not isinstance(g[0], SymbolicZero):
        found.append([_scale(x, g[0]) for x in gradients])
    if not isinstance(g[1], SymbolicZero):
        if z_loss:
            gradients, _ = _scan(x_BTD, head_DV, targets_BT, weight, 0.0, with_gradients=True)
        found.append([_scale(x, g[1]) for x in gradients])
    return *(functools.reduce(jnp.add, parts) for parts in zip(*found, strict=True)), None, None


def _scale(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiply a partial sum by a scalar: the type system wants to see that the scalar is the same on every device."""
    unreduced = jax.typeof(x).sharding.spec.unreduced
    return x * jax.reshard(factor.astype(x.dtype), P(reduced=unreduced))


cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


def _scan(x_BTD, head_DV, targets_BT, weight, z_loss, *, with_gradients):
    """Visit the chunks: return (dx, dhead), and each token's (nll, z-loss term).

    `weight` is a scalar, or `[B, T]`. Without gradients dhead is none, and each token's `best` of `_visit` is in the
    place of dx.
    """
    B, T, D = x_BTD.shape
    targets_BT = jax.reshard(targets_BT, act("BT"))
    n = num_chunks(B, T, head_DV.shape[1])
    if n == 1:
        dhead, (dx, nll, z) = _visit(x_BTD, head_DV, targets_BT, weight, z_loss, with_gradients)
        return (dx, dhead if dhead is None else dhead.astype(head_DV.dtype)), (nll, z)
    vocabulary = axes_of("V")
    x = jax.lax.reshape(x_BTD, (B, T // n, n, D), out_sharding=act("BTCD", reduced=vocabulary))

    def chunks(values_BT):
        parts = jax.lax.reshape(values_BT, (B, T // n, n), out_sharding=act("BTC"))
        return jnp.moveaxis(parts, 2, 0)

    x, targets = jnp.moveaxis(x, 2, 0), chunks(targets_BT)
    weights = chunks(weight) if weight.ndim else None

    def step(dhead, chunk):
        x_BTD, targets_BT, own = chunk
        own = weight if own is None else own
        more, out = _visit(x_BTD, head_DV, targets_BT, own, z_loss, with_gradients)
        return dhead if more is None else dhead + more, out

    start = None
    if with_gradients:
        unreduced = act("DV", unreduced=gradient_axes("DV", "BTD"))
        start = jnp.zeros(head_DV.shape, jnp.float32, out_sharding=unreduced)
        start = vary(start, varying(head_DV))
    dhead, (dx, nll, z) = jax.lax.scan(step, start, (x, targets, weights))
    if dhead is not None:
        dx = jax.lax.reshape(
            jnp.moveaxis(dx, 0, 2), (B, T, D), out_sharding=act("BTD", unreduced=vocabulary)
        )
        dhead = dhead.astype(head_DV.dtype)
    return (dx, dhead), (nll, z)


def _visit(x_BTD, head_DV, targets_BT, weight, z_loss, with_gradients):
    """Visit one chunk: return dhead in float32, and (dx, nll, z-loss term).

    Without gradients: None, and (best, nll, z-loss term), where best says whether no token is likelier than the target.
    """
    logits = jnp.einsum(
        "BTD,DV->BTV", x_BTD, head_DV, out_sharding=act("BTV"), preferred_element_type=jnp.float32
    )
    counted = targets_BT >= 0
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2, out_sharding=act("BTV"))
    gold = ids == targets_BT[:, :, None] - offset("V", logits.shape[2])
    lse, picked, highest = _log_sum_exp(logits, gold)
    nll = jnp.where(counted, lse - picked, 0.0)
    z = jnp.where(counted, z_loss * jnp.square(lse), 0.0)
    if not with_gradients:
        return None, (~counted | (picked >= highest), nll, z)
    scale = jnp.where(counted, weight, 0.0)[:, :, None]
    probabilities = jnp.exp(logits - lse[:, :, None])
    dlogits = scale * (
        probabilities * (1.0 + 2.0 * z_loss * lse[:, :, None]) - gold.astype(jnp.float32)
    )
    dlogits = dlogits.astype(x_BTD.dtype)
    dx = jnp.einsum(
        "BTV,DV->BTD", dlogits, head_DV, out_sharding=act("BTD", unreduced=axes_of("V"))
    )
    dhead = jnp.einsum(
        "BTD,BTV->DV", x_BTD, dlogits, preferred_element_type=jnp.float32,
        out_sharding=act("DV", unreduced=gradient_axes("DV", "BTD")),
    )  # fmt: skip
    return dhead, (dx, nll, z)


def _log_sum_exp(logits_BTV, gold_BTV):
    """Return, over the whole vocabulary, the log-sum-exp of the logits, the logit of the target, and the highest."""
    lowest = jnp.finfo(jnp.float32).min
    own, total = jax.lax.reduce(
        (logits_BTV, jnp.ones_like(logits_BTV)), (lowest, jnp.float32(0)), _join_sums, (2,)
    )
    highest = all_reduce(own, "V", "max")
    total *= jnp.exp(own - highest)
    picked = jnp.sum(jnp.where(gold_BTV, logits_BTV, 0.0), axis=-1)
    total, picked = all_reduce((total, picked), "V")
    return highest + jnp.log(total), picked, highest


def _join_sums(a, b):
    """Join two sums of exponentials, each `(highest, sum of exp(x - highest))`."""
    (high_a, sum_a), (high_b, sum_b) = a, b
    smaller = jnp.exp(-jnp.abs(high_a - high_b))
    first = high_a >= high_b
    total = jnp.where(first, sum_a + sum_b * smaller, sum_a * smaller + sum_b)
    return jnp.maximum(high_a, high_b), total


def cross_entropy_of_pieces(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    weight: jax.Array,
    z_loss: float = 0.0,
    implementation: str = "mosaic",
) -> tuple[jax.Array, jax.Array]:
    """Compute `cross_entropy` by `kernels/linear_cross_entropy.py`, on each device's pieces."""
    partial = act("", unreduced=axes_of("BT"))

    def local(x_BTD, head_DV, targets_BT, weight):
        values = linear_cross_entropy(
            x_BTD.reshape(-1, x_BTD.shape[-1]),
            head_DV,
            targets_BT.reshape(-1),
            weight=weight,
            z_loss=z_loss,
            offset=offset("V", head_DV.shape[1]),
            axes=axes_of("V"),
            implementation=implementation,
        )
        return tuple(leave_partial(value, partial.unreduced) for value in values)

    given = x_BTD, head_DV, jax.reshard(targets_BT, act("BT")), weight
    losses = smap(local, in_specs=specs(given), out_specs=(partial, partial))(*given)
    return jax.reshard(losses, P())
