"""Vocabulary-parallel divergence of a student's distribution from a teacher's, in the chunks of `loss.py`.

A chunk has both models' log-probabilities in float32, from which its losses and gradients follow in one visit, as
there. A stored teacher has the k largest and the sum of all others, which are one event, the ghost token of
arXiv 2503.16870: a divergence over k + 1 events is that over the vocabulary where the teacher has these k, and gives
the sum to the other tokens in the student's own proportions.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ultrascale_jax.config import Distill
from ultrascale_jax.models.loss import (
    LOWEST,
    Visited,
    exps_type,
    is_target,
    log_sum_exp,
    nan_unless_words,
    scale,
    scan_chunks,
)
from ultrascale_jax.models.loss_chunks import DISTILLED
from ultrascale_jax.sharding.primitives import all_reduce, offset, reshard


class Stored(NamedTuple):
    """The teacher's largest probabilities for each target, at the loss's temperature."""

    ids: jax.Array
    """Token ids, int32 `[B, T, k]`."""
    logps: jax.Array
    """Their log-probabilities, and then that of all other tokens, float32 `[B, T, k + 1]`."""


class Form(NamedTuple):
    """The terms of the loss, as `train.distill` has them."""

    reverse: bool
    temperature: float
    hard_weight: float

    @classmethod
    def of(cls, distill: Distill) -> "Form":
        """Return the form that a run asks for."""
        return cls(distill.divergence == "reverse", distill.temperature, distill.hard_weight)


def distillation_loss(
    form: Form,
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    weight: jax.Array,
    teacher: tuple[jax.Array, jax.Array] | Stored,
    vocab_size: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum the weighted losses of all positions that have a target; differentiable in `x_BTD` and `head_DV`.

    Args:
      form: of the loss: hard_weight * cross-entropy + (1 - hard_weight) * temperature^2 * divergence.
      x_BTD: hidden states of the student, and its output head, as of `cross_entropy`.
      head_DV: the head.
      targets_BT: token ids; -1 is not counted, in neither term.
      weight: float32 scalar, the weight of each counted token.
      teacher: the same two of the teacher, whose d_model may differ, or what is stored of its probabilities.
      vocab_size: as of `cross_entropy`.

    Returns:
      The objective, and, without gradients, the cross-entropy and the divergence (nats), float32 scalars.
    """
    objective, *parts = _loss(form, vocab_size, x_BTD, head_DV, targets_BT, weight, teacher)
    nats, divergence = map(jax.lax.stop_gradient, parts)
    return objective, nats, divergence


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(form, vocab_size, x_BTD, head_DV, targets_BT, weight, teacher):
    return _scan(form, vocab_size, x_BTD, head_DV, targets_BT, weight, teacher, trained=True)[1]


def _forward(form, vocab_size, *arguments):
    trained = arguments[1].perturbed
    values = jax.tree.map(lambda v: v.value, arguments, is_leaf=lambda v: hasattr(v, "perturbed"))
    gradients, losses = _scan(form, vocab_size, *values, trained=trained)
    return losses, gradients


def _backward(form, vocab_size, gradients, g):
    dx, dhead = jax.tree.map(lambda x: scale(x, g[0]), gradients)
    return dx, dhead, None, None, None


def _scan(form, vocab_size, x_BTD, head_DV, targets_BT, weight, teacher, *, trained):
    if isinstance(teacher, Stored):
        visit, teachers = functools.partial(_gradients, form, _completed), (tuple(teacher), ())
    else:
        runs = functools.partial(_computed, form.temperature)
        visit, teachers = functools.partial(_gradients, form, runs), (teacher[:1], teacher[1:])
    arguments = x_BTD, head_DV, targets_BT, weight, vocab_size, *teachers
    gradients, (nll_BT, divergence_BT) = scan_chunks(
        visit, *arguments, width=DISTILLED, trained=trained
    )
    nats, divergence = weight * jnp.sum(nll_BT), weight * jnp.sum(divergence_BT)
    soft = (1 - form.hard_weight) * form.temperature**2
    return gradients, (form.hard_weight * nats + soft * divergence, nats, divergence)


def _gradients(form, teacher_logps, x_MD, targets_M, weights_M, head, *teacher):
    """Visit one chunk of a device's tokens: return the gradients, and (nll, divergence)."""
    dtype, tau, f32 = exps_type(x_MD.dtype), form.temperature, jnp.float32
    logits_MV = head.logits(x_MD)
    logp_MV = _log_softmax(head, logits_MV / tau)
    logq_MV = teacher_logps(logp_MV, head, *teacher)
    logits_MV = head.fill(logits_MV, LOWEST)
    gold_MV = is_target(targets_M, logits_MV)
    lse_M, picked_M, _ = log_sum_exp(logits_MV, gold_MV)
    picked_M = nan_unless_words(picked_M, targets_M, head.vocab_size)
    p_MV, q_MV, ratio_MV = jnp.exp(logp_MV), jnp.exp(logq_MV), logp_MV - logq_MV
    terms_MV = p_MV * ratio_MV if form.reverse else -q_MV * ratio_MV
    divergence_M = all_reduce(jnp.sum(terms_MV, axis=1), "V")
    soft_MV = p_MV * (ratio_MV - divergence_M[:, None]) if form.reverse else p_MV - q_MV
    hard_MV = jnp.exp(logits_MV - lse_M[:, None]) - gold_MV
    dlogits_MV = form.hard_weight * hard_MV + (1 - form.hard_weight) * tau * soft_MV
    counted_M = targets_M != -1
    dlogits_MV = (jnp.where(counted_M, weights_M, 0.0)[:, None] * dlogits_MV).astype(dtype)
    dx = jnp.einsum("MV,DV->MD", dlogits_MV, head.weight_DV, preferred_element_type=f32)
    dhead = jnp.einsum("MD,MV->DV", x_MD, dlogits_MV, preferred_element_type=f32)
    losses = tuple(jnp.where(counted_M, v, 0.0) for v in (lse_M - picked_M, divergence_M))
    return Visited(losses, dx.astype(x_MD.dtype), dhead)


def _computed(tau, logp_MV, head, teacher_MD, teacher_head):
    """Return the log-probabilities of a teacher that runs."""
    return _log_softmax(teacher_head, teacher_head.logits(teacher_MD) / tau)


def _completed(logp_MV, head, ids_MK, logps_MJ):
    """Return the log-probabilities of a stored teacher, whose other tokens have the student's proportions."""
    others_M = _of_others(logp_MV, ids_MK)
    logq_MV = logp_MV + (logps_MJ[:, -1] - others_M)[:, None]
    return head.fill(_put(logq_MV, ids_MK, logps_MJ[:, :-1]), LOWEST)


def _of_others(logp_MV, ids_MK):
    """Return the log-probability of all tokens but `ids_MK`, `LOWEST` if there are none."""
    masked_MV = _put(logp_MV, ids_MK, LOWEST)
    return log_sum_exp(masked_MV, jnp.zeros_like(masked_MV, bool))[0]


def _put(values_MV, ids_MK, values):
    """Put values into the columns of the tokens `ids_MK` that are in this device's part of the vocabulary."""
    columns_MK = ids_MK - offset("V", values_MV.shape[1])
    at = values_MV.at[jnp.arange(len(ids_MK))[:, None], columns_MK]
    return at.set(values, mode="drop", wrap_negative_indices=False)


def largest(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    k: int,
    temperature: float,
    vocab_size: int | None = None,
) -> Stored:
    """Return the `k` largest probabilities of each target, at a temperature; arguments as of `cross_entropy`."""
    visit = functools.partial(_largest, k, temperature)
    arguments = x_BTD, head_DV, targets_BT, jnp.float32(1.0), vocab_size
    how = {"width": DISTILLED, "trained": False, "with_gradients": False}
    _, (ids, logps, ghosts) = scan_chunks(visit, *arguments, **how)
    return Stored(ids, jnp.concatenate([logps, ghosts], axis=2))


def _largest(k, tau, x_MD, targets_M, weights_M, head):
    """Visit one chunk of a device's tokens: return the ids of the largest, their logps, and that of all others."""
    logq_MV = _log_softmax(head, head.logits(x_MD) / tau)
    logps_MK, columns_MK = jax.lax.top_k(logq_MV, min(k, logq_MV.shape[1]))
    ids_MK = columns_MK + offset("V", logq_MV.shape[1])
    # The parts of the vocabulary have candidates, of which each device chooses the same.
    logps_MK, ids_MK = (reshard("MV->MO", x) for x in (logps_MK, ids_MK))
    logps_MK, places_MK = jax.lax.top_k(logps_MK, k)
    ids_MK = jnp.take_along_axis(ids_MK, places_MK, axis=1)
    logps_MK, ids_MK = all_reduce((logps_MK, ids_MK), "V", "max")
    return Visited((ids_MK, logps_MK, _of_others(logq_MV, ids_MK)[:, None]))


def _log_softmax(head, logits_MV):
    """Return the log-probabilities of this device's part of the vocabulary; `LOWEST` where it is padded."""
    logits_MV = head.fill(logits_MV, LOWEST)
    lse_M, *_ = log_sum_exp(logits_MV, jnp.zeros_like(logits_MV, bool))
    return logits_MV - lse_M[:, None]


_loss.defvjp(_forward, _backward, symbolic_zeros=True)
