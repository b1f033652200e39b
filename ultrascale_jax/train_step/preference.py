"""Direct preference optimisation (arXiv 2305.18290): the loss of pairs of answers from the log-likelihoods of tokens.

A row holds pairs, each as two documents: of pair p the chosen one has segment 2p + 1, the rejected one 2p + 2. An
answer's log-likelihood is the sum over its tokens, so only cp adds up over devices, two numbers a pair. All of this
runs on global arrays and, in a pipeline, on a device's shards.
"""

import jax
import jax.numpy as jnp

from ultrascale_jax.config.dpo import Dpo
from ultrascale_jax.models.layers import gather_sequence
from ultrascale_jax.models.loss import token_losses
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.primitives import all_reduce

SUMS = ("reward_chosen", "reward_rejected", "reward_accuracy", "logp_chosen", "logp_rejected")
"""Metrics that are means over pairs, by the order of their sums."""


def count_pairs(batch: dict[str, jax.Array]) -> jax.Array:
    """Return the number of pairs; int32 scalar. A row's padding is its last segment, of odd number."""
    return jnp.sum(_pairs_of_rows(batch))


def _pairs_of_rows(batch: dict[str, jax.Array]) -> jax.Array:
    return all_reduce(jnp.max(batch["segment_ids"], axis=1), "T", "max") // 2


def answer_logps(
    model: Transformer,
    x_BRD: jax.Array,
    batch: dict[str, jax.Array],
    pairs: int,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Return the log-likelihoods `[B, P, 2]` of chosen and rejected answers, float32; 0 where a row has no more pairs.

    `x_BRD` are the model's hidden states after the final norm, and `pairs` is `most_pairs` of a full row.
    """
    with jax.named_scope("loss"):
        x_BTD, head = gather_sequence(x_BRD, "V"), model.head_weight(dtype)
        losses_BT = token_losses(
            x_BTD, head, batch["targets"], model.cfg.vocab_size, model.cfg.logit_cap
        )
        return -_by_answer(losses_BT, batch, pairs)


def _by_answer(values_BT: jax.Array, batch: dict[str, jax.Array], pairs: int) -> jax.Array:
    """Sum over the tokens of each answer: `[B, P, 2]`."""
    segments = jnp.arange(1, 2 * pairs + 1, dtype=jnp.int32)[None, None, :]
    is_answer = batch["segment_ids"][:, :, None] == segments
    sums = jnp.sum(jnp.where(is_answer, values_BT[:, :, None], 0.0), axis=1)
    return all_reduce(sums, "T").reshape(-1, pairs, 2)


def pair_losses(
    dpo: Dpo,
    policy_BP2: jax.Array,
    reference_BP2: jax.Array | None,
    batch: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Return the sum of the pairs' losses, and the sums of `SUMS`, float32 [5].

    Args:
      dpo: the loss.
      policy_BP2: `answer_logps` of the model that is trained.
      reference_BP2: the same of the reference; None is 0.
      batch: rows of pairs.
    """
    is_pair = jnp.arange(policy_BP2.shape[1])[None, :] < _pairs_of_rows(batch)[:, None]
    ratios = policy_BP2 if reference_BP2 is None else policy_BP2 - reference_BP2
    rewards = jax.lax.stop_gradient(dpo.beta * ratios)
    if dpo.loss == "ipo":
        is_target_BT = (batch["targets"] >= 0).astype(jnp.float32)
        tokens = _by_answer(is_target_BT, batch, policy_BP2.shape[1])
        means = ratios / jnp.maximum(tokens, 1.0)
        losses = jnp.square(means[..., 0] - means[..., 1] - 1 / (2 * dpo.beta))
    else:
        margin = dpo.beta * (ratios[..., 0] - ratios[..., 1])
        smoothing = dpo.label_smoothing
        losses = -(1 - smoothing) * jax.nn.log_sigmoid(margin)
        losses -= smoothing * jax.nn.log_sigmoid(-margin)
    logps = jax.lax.stop_gradient(policy_BP2)
    accurate = (rewards[..., 0] > rewards[..., 1]).astype(jnp.float32)
    metrics = (rewards[..., 0], rewards[..., 1], accurate, logps[..., 0], logps[..., 1])
    total, *sums = (jnp.sum(jnp.where(is_pair, value, 0.0)) for value in (losses, *metrics))
    return total, jnp.stack(sums)


def metrics(sums: jax.Array, pairs: jax.Array) -> dict[str, jax.Array]:
    """Return the metrics of a step or an evaluation from the sums over its pairs."""
    means = sums / jnp.maximum(pairs, 1).astype(jnp.float32)
    by_name = dict(zip(SUMS, means, strict=True))
    margin = by_name["reward_chosen"] - by_name["reward_rejected"]
    return by_name | {"reward_margin": margin, "pairs": pairs}
