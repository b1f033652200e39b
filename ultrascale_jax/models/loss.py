"""Vocabulary-parallel cross-entropy that never holds the logits: chunks of tokens, gradients made on the way.

For each chunk the loss and the gradients of hidden states and head are computed in one visit, so the backward pass has
nothing to recompute. The largest buffer is one chunk of exponentials in the type of compute, which the product of the
logits writes; a pass sums them, and the two other products read them. Each device cuts its own tokens.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from ultrascale_jax.kernels.linear_cross_entropy import linear_cross_entropy
from ultrascale_jax.kernels.xla import compute_together, materialised
from ultrascale_jax.models.loss_chunks import CAPPED, num_chunks
from ultrascale_jax.sharding.manual import leave_partial, smap
from ultrascale_jax.sharding.primitives import all_reduce, offset
from ultrascale_jax.sharding.rules import act, axes_of, gradient_axes, mesh_size, place, specs, vary

MOST_ABOVE_TARGET = 40.0
"""Log-sum-exp above the target's logit, in nats, from which on the exponentials are made from the highest logit.

Up to it, a token's weight over its sum of exponentials, a factor of its gradients, is far above float32's e^-87.
"""

ROWS_OF_LOGITS = 256
"""Tokens whose float32 logits are in memory at once while the highest logits are looked for."""

LOWEST = jnp.finfo(jnp.float32).min
"""Logit of a column of padding: below all others, and finite, so that two of them have a difference."""


def exps_type(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Return the type of exponentials where a model computes in `dtype`: one with the range of float32."""
    return jnp.dtype(jnp.float32 if dtype == jnp.float16 else dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def cross_entropy(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    weight: jax.Array,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    cap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Sum the weighted negative log-likelihoods of `targets_BT`; differentiable in `x_BTD` and `head_DV`.

    Args:
      x_BTD: hidden states, `reduced` over the axes of V (`gather_sequence`).
      head_DV: output head, in the type of compute.
      targets_BT: token ids; -1 is not counted. An id outside the vocabulary turns the loss into NaN.
      weight: float32 scalar, the weight of each counted token; 1 / number of tokens gives the mean.
      z_loss: adds `z_loss * logsumexp(logits)^2` for each counted token (arXiv 2204.02311, section 5).
      vocab_size: columns of the full head that are words; the others pad it. None: all.
      cap: `model.logit_cap`; with one a chunk has float32 logits instead of exponentials.

    Returns:
      The objective (with z-loss) and the bare cross-entropy, float32 scalars; in a manual region the sums over this
      device's part of the batch and the sequence.
    """
    arguments = x_BTD, head_DV, targets_BT, weight, z_loss, vocab_size, cap
    _, (_, nll, z) = _scan(*arguments, with_gradients=False)
    return weight * jnp.sum(nll + z), weight * jnp.sum(nll)


def row_losses(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    vocab_size: int | None = None,
    cap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Sum the negative log-likelihoods of each row's targets; arguments as of `cross_entropy`.

    Returns:
      The sums, float32 `[B]`, and whether no token is likelier than a target anywhere in the row, bool `[B]`.
    """
    arguments = x_BTD, head_DV, targets_BT, jnp.float32(1.0), 0.0, vocab_size, cap
    _, (best, nll, _) = _scan(*arguments, with_gradients=False)
    return jnp.sum(nll, axis=1), jnp.all(best, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def token_losses(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    vocab_size: int | None = None,
    cap: float = 0.0,
) -> jax.Array:
    """Return the negative log-likelihood of each target, float32 `[B, T]`, 0 where the target is -1.

    Differentiable as `cross_entropy` is, whose arguments these are, by any function of the losses; the backward pass
    computes the logits again.
    """
    arguments = x_BTD, head_DV, targets_BT, jnp.float32(1.0), 0.0, vocab_size, cap
    _, (_, nll, _) = _scan(*arguments, with_gradients=False)
    return nll


def _token_losses_forward(x_BTD, head_DV, targets_BT, vocab_size, cap):
    trained = _is_trained(head_DV)
    arguments = tuple(argument.value for argument in (x_BTD, head_DV, targets_BT))
    return token_losses(*arguments, vocab_size, cap), (arguments, trained)


def _token_losses_backward(vocab_size, cap, kept, g_BT):
    arguments, trained = kept
    arguments = *arguments, g_BT, 0.0, vocab_size, cap
    (dx, dhead), _ = _scan(*arguments, with_gradients=True, trained=trained is not None)
    return dx, dhead, None


def _is_trained(head: Any) -> tuple[()] | None:
    """Return, as a tree without leaves, whether the head is differentiated: a frozen one is not."""
    return () if head.perturbed else None


token_losses.defvjp(_token_losses_forward, _token_losses_backward, symbolic_zeros=True)


def _forward(x_BTD, head_DV, targets_BT, weight, z_loss, vocab_size, cap):
    trained = head_DV.perturbed
    x_BTD, head_DV, targets_BT, weight = (v.value for v in (x_BTD, head_DV, targets_BT, weight))
    arguments = x_BTD, head_DV, targets_BT, weight, z_loss, vocab_size, cap
    gradients, (nll, z) = _scan(*arguments, with_gradients=True, trained=trained)
    losses = weight * jnp.sum(nll + z), weight * jnp.sum(nll)
    return losses, (gradients, arguments[:4])


def _backward(z_loss, vocab_size, cap, kept, g):
    """Scale the gradients that the forward pass computed, and compute the bare loss's if it has a cotangent."""
    gradients, (x_BTD, head_DV, targets_BT, weight) = kept
    scaled = []
    if not isinstance(g[0], SymbolicZero):
        scaled.append(jax.tree.map(lambda x: scale(x, g[0]), gradients))
    if not isinstance(g[1], SymbolicZero):
        if z_loss:
            trained = gradients[1] is not None
            arguments = x_BTD, head_DV, targets_BT, weight, 0.0, vocab_size, cap
            gradients, _ = _scan(*arguments, with_gradients=True, trained=trained)
        scaled.append(jax.tree.map(lambda x: scale(x, g[1]), gradients))
    dx, dhead = functools.reduce(lambda *parts: jax.tree.map(jnp.add, *parts), scaled)
    return dx, dhead, None, None


def scale(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiply a partial sum by a scalar, whose type says that it is the same on every device."""
    unreduced = jax.typeof(x).sharding.spec.unreduced
    return x * place(factor.astype(x.dtype), P(reduced=unreduced))


cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


class Head(NamedTuple):
    """A device's part of the output head."""

    weight_DV: jax.Array
    vocab_size: int
    """Columns of the full head that are words; the others pad it."""
    cap: float = 0.0
    """The model's `logit_cap`."""

    def logits(self, x_MD: jax.Array) -> jax.Array:
        """Return logits in float32, of columns that are no words too."""
        logits = jnp.einsum("MD,DV->MV", x_MD, self.weight_DV, preferred_element_type=jnp.float32)
        return capped(logits, self.cap)

    def fill(self, values_MV: jax.Array, value: float) -> jax.Array:
        """Put `value` into columns that are no words, and write only the last columns, which may be some."""
        columns = values_MV.shape[1]
        padding = min(columns, columns * mesh_size(*axes_of("V")) - self.vocab_size)
        if not padding:
            return values_MV
        first = columns - padding
        numbers_1V = jax.lax.broadcasted_iota(jnp.int32, (1, padding), 1) + offset("V", columns)
        last_MV = jnp.where(numbers_1V + first < self.vocab_size, values_MV[:, first:], value)
        return jax.lax.dynamic_update_slice_in_dim(values_MV, last_MV, first, 1)


def capped(logits: jax.Array, cap: float) -> jax.Array:
    """Return logits as `model.logit_cap` bounds them."""
    return cap * jnp.tanh(logits / cap) if cap else logits


def _scan(
    x_BTD, head_DV, targets_BT, weight, z_loss, vocab_size, cap, *, with_gradients, trained=True
):
    """Return (dx, dhead), and each token's (nll, z-loss term), or without gradients `by_token` of `_losses`."""
    of_chunk = _capped_gradients if cap else _gradients
    visit = functools.partial(of_chunk if with_gradients else _losses, z_loss)
    width = CAPPED if cap else exps_type(x_BTD.dtype).itemsize
    how = {"width": width, "trained": trained, "with_gradients": with_gradients, "cap": cap}
    return scan_chunks(visit, x_BTD, head_DV, targets_BT, weight, vocab_size, **how)


class Visited(NamedTuple):
    """Results of a function of a chunk of M tokens; without gradients only `by_token`."""

    by_token: tuple[jax.Array, ...]
    """`[M, ...]` each."""
    dx: jax.Array | None = None
    dhead: jax.Array | None = None
    """In float32; its sum over the chunks counts."""


def scan_chunks(
    function: Callable[..., Visited],
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    weight: jax.Array,
    vocab_size: int | None,
    by_token: Sequence[jax.Array] = (),
    heads: Sequence[jax.Array] = (),
    *,
    width: int,
    trained: bool,
    with_gradients: bool = True,
    cap: float = 0.0,
) -> Any:
    """Visit the chunks of each device's tokens: return (dx, dhead), and `Visited.by_token` of all, `[B, T, ...]`.

    Args:
      function: takes a chunk's hidden states, targets and weights, the `Head`, and a chunk of each of `by_token`, and
        `heads`.
      x_BTD, head_DV, targets_BT, vocab_size, cap: as of `cross_entropy`; weight: a scalar, or `[B, T]`.
      by_token, heads: other arrays `[B, T, ...]`, and the heads of other models with the same vocabulary.
      width: bytes of a chunk for each logit.
      trained, with_gradients: whether the head is, dhead is none if not; and whether `function` has dx.
    """
    of_x, of_head = axes_of("V"), gradient_axes("DV", "BTD")
    partial = act("BTD", unreduced=of_x), act("DV", unreduced=of_head)
    trained = trained and with_gradients

    def local(x_BTD, head_DV, targets_BT, weight, by_token, heads):
        x_BTD, head_DV = vary(x_BTD, of_x), vary(head_DV, of_head)
        words = vocab_size or head_DV.shape[1] * mesh_size(*axes_of("V"))
        heads = [Head(vary(one, of_head), words, cap) for one in (head_DV, *heads)]
        weight = jnp.broadcast_to(weight, targets_BT.shape)
        n = num_chunks(targets_BT.size, head_DV.shape[1], width)
        tokens = _cut(x_BTD, n), _cut(targets_BT, n, fill=-1), _cut(weight, n)
        tokens += tuple(_cut(vary(value, of_x), n) for value in by_token)
        dhead, chunks = _visit_each(function, tokens, heads, trained=trained)
        dx, by_token = jax.tree.map(lambda *parts: _join(parts, *targets_BT.shape), *chunks)
        if dhead is not None:
            # XLA would leave the head's gradient for the end of the backward pass, and keep the exponentials for it.
            dx, dhead = compute_together((dx, dhead.astype(head_DV.dtype)))
            dhead = leave_partial(dhead, partial[1].unreduced)
        if dx is not None:
            dx = leave_partial(dx, partial[0].unreduced)
        return (dx, dhead), by_token

    inputs = x_BTD, head_DV, place(targets_BT, act("BT")), weight, tuple(by_token), tuple(heads)
    gradients = partial[0] if with_gradients else None, partial[1] if trained else None
    return smap(local, in_specs=specs(inputs), out_specs=(gradients, act("BT")))(*inputs)


def _visit_each(
    function: Callable[..., Visited],
    tokens: Sequence[jax.Array],
    heads: Sequence[Head],
    *,
    trained: bool,
) -> tuple[Any, list[Any]]:
    """Return the sum of the head's gradients over the chunks `[chunks, ...]`, and the tokens' results, in parts."""

    def visit(dhead, chunk):
        visited = function(*chunk[:3], heads[0], *chunk[3:], *heads[1:])
        rows = visited.dx, visited.by_token
        if not trained:
            return None, rows
        return visited.dhead if dhead is None else dhead + visited.dhead, rows

    # The scan starts from the first chunk's gradient of the head, and not from zeros.
    dhead, first = visit(None, tuple(value[0] for value in tokens))
    chunks = [jax.tree.map(lambda value: value[None], first)]
    if len(tokens[0]) > 1:
        # The barrier keeps XLA from computing the exponentials of two chunks at once.
        later_tokens = tuple(value[1:] for value in tokens)
        later_tokens, dhead, chunks = compute_together((later_tokens, dhead, chunks))
        dhead, later = jax.lax.scan(visit, dhead, later_tokens)
        chunks.append(later)
    return dhead, chunks


def _join(chunks: Sequence[jax.Array], rows: int, seq_len: int) -> jax.Array:
    """Invert `_cut` for parts `[..., M, ...]` of the chunks: `[B, T, ...]`."""
    value = jnp.concatenate(chunks)
    value = value.reshape(-1, *value.shape[2:])[: rows * seq_len]
    return value.reshape(rows, seq_len, *value.shape[1:])


def _cut(value_BT: jax.Array, chunks: int, fill: float = 0) -> jax.Array:
    """Cut a device's tokens into equal chunks, the last one filled up: `[B, T, ...]` to `[chunks, M, ...]`."""
    value_N = value_BT.reshape(-1, *value_BT.shape[2:])
    rows = -(-len(value_N) // chunks)
    padding = [(0, chunks * rows - len(value_N))] + [(0, 0)] * (value_N.ndim - 1)
    value_N = jnp.pad(value_N, padding, constant_values=fill)
    return value_N.reshape(chunks, rows, *value_N.shape[1:])


def _gradients(z_loss, x_MD, targets_M, weights_M, head):
    """Visit one chunk of a device's tokens: return the gradients, and (nll, z-loss term).

    The softmax of a token is its exponentials over their sum. Both products take the exponentials, and the factor is
    put to their few other rows, so that no pass computes the gradient of the logits.
    """
    dtype, f32 = exps_type(x_MD.dtype), jnp.float32
    picked_M, columns_M, counted_M = _target_logits(x_MD, targets_M, head)
    exps_MV, total_M, shift_M = _exponentials(x_MD, head, picked_M, counted_M)
    total_M = jnp.where(counted_M, total_M, 1.0)
    nll_M = jnp.where(counted_M, shift_M - picked_M + jnp.log(total_M), 0.0)
    lse_M = picked_M + nll_M
    of_lse_M = _of_lse(z_loss, lse_M)
    of_lse_M = jnp.where(jnp.abs(of_lse_M) < 1e-6, 1e-6, of_lse_M)  # a divisor below
    factor_M1 = (weights_M * of_lse_M / total_M)[:, None]
    target_exps_M = jnp.exp(picked_M - shift_M) - total_M / of_lse_M
    exps_MV = exps_MV.at[jnp.arange(len(targets_M)), columns_M].set(
        target_exps_M.astype(dtype),
        **{"mode": "drop", "unique_indices": True, "wrap_negative_indices": False},
    )
    dx = jnp.einsum("MV,DV->MD", exps_MV, head.weight_DV, preferred_element_type=f32) * factor_M1
    dx, exps_MV = compute_together((dx.astype(x_MD.dtype), exps_MV))
    scaled_MD = (x_MD * factor_M1).astype(dtype)
    dhead = jnp.einsum("MD,MV->DV", scaled_MD, exps_MV, preferred_element_type=f32)
    z_M = z_loss * jnp.square(lse_M)  # 0 where no token counts
    return Visited((nll_M, z_M), dx, dhead)


def _capped_gradients(z_loss, x_MD, targets_M, weights_M, head):
    """Visit one chunk as `_gradients` does, for capped logits, on whose values their gradients depend."""
    dtype, f32 = exps_type(x_MD.dtype), jnp.float32
    logits_MV = head.logits(x_MD)
    slope_MV = 1 - jnp.square(logits_MV / head.cap)
    gold_MV = is_target(targets_M, logits_MV)
    lse_M, picked_M, _ = log_sum_exp(head.fill(logits_MV, LOWEST), gold_MV)
    counted_M, _, nll_M, z_M = _of_targets(z_loss, lse_M, picked_M, targets_M, head)
    softmax_MV = head.fill(jnp.exp(logits_MV - lse_M[:, None]), 0.0)
    dlogits_MV = (_of_lse(z_loss, lse_M)[:, None] * softmax_MV - gold_MV) * slope_MV
    dlogits_MV = jnp.where(counted_M, weights_M, 0.0)[:, None] * dlogits_MV
    dlogits_MV = materialised(dlogits_MV.astype(dtype))
    dx = jnp.einsum("MV,DV->MD", dlogits_MV, head.weight_DV, preferred_element_type=f32)
    dhead = jnp.einsum("MD,MV->DV", x_MD, dlogits_MV, preferred_element_type=f32)
    return Visited((nll_M, z_M), dx.astype(x_MD.dtype), dhead)


def _of_lse(z_loss, lse_M):
    """Return the derivative of a token's loss and z-loss by its log-sum-exp."""
    return 1.0 + 2.0 * z_loss * lse_M


def is_target(targets_M, logits_MV):
    """Return where each row's target stands in this device's part of the vocabulary."""
    columns_M = targets_M - offset("V", logits_MV.shape[1])
    return jax.lax.broadcasted_iota(jnp.int32, logits_MV.shape, 1) == columns_M[:, None]


def _target_logits(x_MD, targets_M, head):
    """Return the logit of each target, 0 where none counts; the target's column here; whether the target counts."""
    columns_M = targets_M - offset("V", head.weight_DV.shape[1])
    words_VD = head.weight_DV.T.at[columns_M]
    targets_MD = words_VD.get(mode="fill", fill_value=0, wrap_negative_indices=False)
    picked_M = jnp.sum(x_MD.astype(jnp.float32) * targets_MD.astype(jnp.float32), axis=1)
    picked_M = nan_unless_words(all_reduce(picked_M, "V"), targets_M, head.vocab_size)
    return picked_M, columns_M, targets_M != -1


def nan_unless_words(logits_M, targets_M, vocab_size):
    """Return the targets' logits, NaN for a target that is neither -1 nor a word of the vocabulary."""
    is_word_M = (targets_M >= -1) & (targets_M < vocab_size)
    return jnp.where(is_word_M, logits_M, jnp.nan)


def _exponentials(x_MD, head, picked_M, counted_M):
    """Return `exp(logit - shift)` in `exps_type`, its sum over the full vocabulary, and the shift of each token.

    The shift is the target's logit, known before the product, whose epilogue then writes the exponentials. Should that
    be too low for any token, the loop runs once, and computes them all again from the highest logits. The exponentials
    of a token that does not count are 0.
    """

    def shifted(shift_M):
        # Made before the product: XLA keeps the exponentials out of a product whose epilogue would have to select.
        shift_M = materialised(jnp.where(counted_M, shift_M, jnp.inf))
        exps_MV = jnp.exp(head.logits(x_MD) - shift_M[:, None])
        # In their own type before they are summed: the product writes them, and float32 logits never reach memory.
        exps_MV = materialised(exps_MV.astype(exps_type(x_MD.dtype)))
        exps_MV = head.fill(exps_MV, 0.0)
        return exps_MV, all_reduce(jnp.sum(exps_MV, axis=1, dtype=jnp.float32), "V"), shift_M

    def too_low(state):
        return jnp.any(state[1] > math.exp(MOST_ABOVE_TARGET))

    def from_highest(_):
        highest_M = jax.lax.map(
            lambda x_D: jnp.max(head.fill(head.logits(x_D[None]), LOWEST)),
            x_MD,
            batch_size=ROWS_OF_LOGITS,
        )
        return shifted(all_reduce(highest_M, "V", "max"))

    start = shifted(picked_M)
    with jax.named_scope("from_highest_logits"):
        return jax.lax.while_loop(too_low, from_highest, start)


def _losses(z_loss, x_MD, targets_M, weights_M, head):
    """Visit one chunk of a device's tokens: return (best, nll, z-loss term).

    `best` says whether no token is likelier than the target.
    """
    logits_MV = head.fill(head.logits(x_MD), LOWEST)
    lse_M, picked_M, highest_M = log_sum_exp(logits_MV, is_target(targets_M, logits_MV))
    counted_M, picked_M, nll_M, z_M = _of_targets(z_loss, lse_M, picked_M, targets_M, head)
    return Visited((~counted_M | (picked_M >= highest_M), nll_M, z_M))


def _of_targets(z_loss, lse_M, picked_M, targets_M, head):
    """Return whether each target counts, its logit (NaN if it is no word), and both losses: nll, and z-loss term."""
    picked_M = nan_unless_words(picked_M, targets_M, head.vocab_size)
    counted_M = targets_M != -1
    nll_M = jnp.where(counted_M, lse_M - picked_M, 0.0)
    z_M = jnp.where(counted_M, z_loss * jnp.square(lse_M), 0.0)
    return counted_M, picked_M, nll_M, z_M


def log_sum_exp(logits_MV, gold_MV):
    """Return, over the full vocabulary, the log-sum-exp of the logits, the logit of the target, and the highest."""
    highest_of_shard, total = jax.lax.reduce(
        (logits_MV, jnp.ones_like(logits_MV)), (LOWEST, jnp.float32(0)), _join_sums, (1,)
    )
    highest = all_reduce(highest_of_shard, "V", "max")
    total *= jnp.exp(highest_of_shard - highest)
    picked = jnp.sum(jnp.where(gold_MV, logits_MV, 0.0), axis=-1)
    total, picked = all_reduce((total, picked), "V")
    return highest + jnp.log(total), picked, highest


def _join_sums(a, b):
    """Join two sums of exponentials, each `(highest, sum of exp(x - highest))`."""
    (high_a, sum_a), (high_b, sum_b) = a, b
    smaller = jnp.exp(-jnp.abs(high_a - high_b))
    first = high_a >= high_b
    total = jnp.where(first, sum_a + sum_b * smaller, sum_a * smaller + sum_b)
    return jnp.maximum(high_a, high_b), total


def cross_entropy_of_shards(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    weight: jax.Array,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    implementation: str = "mosaic",
) -> tuple[jax.Array, jax.Array]:
    """Compute `cross_entropy` by `kernels/linear_cross_entropy.py`, on each device's shards."""
    partial = act("", unreduced=axes_of("BT"))

    def local(x_BTD, head_DV, targets_BT, weight):
        values = linear_cross_entropy(
            x_BTD.reshape(-1, x_BTD.shape[-1]),
            head_DV,
            targets_BT.reshape(-1),
            weight=weight,
            z_loss=z_loss,
            offset=offset("V", head_DV.shape[1]),
            vocab_size=vocab_size,
            axes=sorted(axes_of("V")),
            implementation=implementation,
        )
        return tuple(leave_partial(value, partial.unreduced) for value in values)

    inputs = x_BTD, head_DV, place(targets_BT, act("BT")), weight
    losses = smap(local, in_specs=specs(inputs), out_specs=(partial, partial))(*inputs)
    return place(losses, P())
