"""Attention by its definition, with scores and softmax in float32: the reference of every implementation."""

import jax
import jax.numpy as jnp

from ultrascale_jax.kernels.attention_mask import (
    PLAIN_SCORES,
    UNSEEN,
    BlockMask,
    Scores,
    visible_keys,
)


def attention_reference(q, k, v, q_index, segment_ids=None, window=None, sinks=None) -> jax.Array:
    """Compute `attention` of these arguments; `window` may be an array."""
    k_index = jnp.arange(k.shape[1], dtype=jnp.int32)
    visible = visible_keys(q_index, k_index, segment_ids, window)
    scores_BKGTS = _masked(_scores(q, k, PLAIN_SCORES), visible)
    if sinks is None:
        probabilities = jax.nn.softmax(scores_BKGTS, axis=-1)
    else:
        B, K, G, T, S = scores_BKGTS.shape
        column = jnp.broadcast_to(sinks.reshape(1, K, G, 1, 1), (B, K, G, T, 1))
        scores_BKGTS = jnp.concatenate([scores_BKGTS, column], axis=-1)
        probabilities = jax.nn.softmax(scores_BKGTS, axis=-1)[..., :S]
    return _ungroup(_weighted(probabilities, v)).astype(q.dtype)


def forward(q, k, v, mask: BlockMask, scores: Scores) -> tuple[jax.Array, jax.Array]:
    """Compute `attention_forward`."""
    B, T, N = q.shape[:3]
    visible = mask.dense(T, k.shape[1])
    scores_BKGTS = _masked(_scores(q, k, scores), visible)
    lse_BKGT = jax.nn.logsumexp(scores_BKGTS, axis=-1)
    probabilities = jnp.exp(scores_BKGTS - lse_BKGT[..., None])
    return _ungroup(_weighted(probabilities, v)).astype(q.dtype), lse_BKGT.reshape(B, N, T)


def backward(
    q, k, v, out, lse, dout, mask: BlockMask, scores: Scores
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute `attention_backward`."""
    K, f32 = k.shape[2], jnp.float32
    visible = mask.dense(q.shape[1], k.shape[1])
    scores_BKGTS = _scores(q, k, scores)
    rows = scores_BKGTS.shape[:4]
    probabilities = jnp.exp(_masked(scores_BKGTS, visible) - lse.reshape(rows)[..., None])
    dout_BKGTH = _group(dout, K)
    delta_BNT = jnp.einsum("BTNH,BTNH->BNT", dout, out, preferred_element_type=f32)
    dv = jnp.einsum(
        "BKGTS,BKGTH->BSKH", probabilities.astype(v.dtype), dout_BKGTH, preferred_element_type=f32
    )
    dprobabilities = jnp.einsum("BKGTH,BSKH->BKGTS", dout_BKGTH, v, preferred_element_type=f32)
    dscores = probabilities * (dprobabilities - delta_BNT.reshape(rows)[..., None])
    if scores.softcap is not None:
        dscores *= 1 - jnp.square(scores_BKGTS / scores.softcap)
    dscores = (dscores / scores.divisor(q.shape[3])).astype(q.dtype)
    dq = jnp.einsum("BKGTS,BSKH->BKGTH", dscores, k, preferred_element_type=f32)
    dk = jnp.einsum("BKGTS,BKGTH->BSKH", dscores, _group(q, K), preferred_element_type=f32)
    return _ungroup(dq).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _scores(q, k, scores: Scores):
    """Return scores `[B, K, G, T, S]` float32."""
    q_BKGTH = _group(q, k.shape[2])
    B, K, G, T, H = q_BKGTH.shape
    # G and T become one dim, and heads come first, so only these arrays are transposed and never the scores.
    q_BKQH, k_BKSH = q_BKGTH.reshape(B, K, G * T, H), jnp.moveaxis(k, 1, 2)
    products = jnp.einsum("BKQH,BKSH->BKQS", q_BKQH, k_BKSH, preferred_element_type=jnp.float32)
    scores_BKGTS = products.reshape(B, K, G, T, k.shape[1]) / scores.divisor(H)
    if scores.softcap is None:
        return scores_BKGTS
    return scores.softcap * jnp.tanh(scores_BKGTS / scores.softcap)


def _masked(scores_BKGTS, visible):
    """Return the scores, a large negative number for masked keys."""
    if visible is None:
        return scores_BKGTS
    return jnp.where(visible[:, None, None], scores_BKGTS, UNSEEN)


def _weighted(probabilities_BKGTS, v):
    """Return the values' mean `[B, K, G, T, H]` under these probabilities."""
    B, K, G, T, S = probabilities_BKGTS.shape
    probabilities = probabilities_BKGTS.astype(v.dtype).reshape(B, K, G * T, S)
    out = jnp.einsum("BKQS,BKSH->BKQH", probabilities, jnp.moveaxis(v, 1, 2))
    return out.reshape(B, K, G, T, v.shape[3])


def _group(x_BTNH, K: int):
    """Reshape `[B, T, N, H]` to `[B, K, G, T, H]`."""
    B, T, N, H = x_BTNH.shape
    return jnp.moveaxis(x_BTNH.reshape(B, T, K, N // K, H), 1, 3)


def _ungroup(x_BKGTH):
    """Reshape `[B, K, G, T, H]` to `[B, T, N, H]`."""
    B, K, G, T, H = x_BKGTH.shape
    return jnp.moveaxis(x_BKGTH, 3, 1).reshape(B, T, K * G, H)
