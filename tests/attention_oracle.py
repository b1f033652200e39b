"""The definition of attention in dense float64 numpy: what every kernel and every strategy must equal."""

from typing import NamedTuple

import numpy as np


class Dense(NamedTuple):
    """`out` [B, T, N, H], `lse` [B, N, T], and the gradients with the shapes of q, k and v."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def dense_attention(
    q,
    k,
    v,
    d_out,
    *,
    positions=None,
    segment_ids=None,
    window=None,
    causal=True,
    scale=None,
    softcap=None,
) -> Dense:
    """Softmax(q k^T / sqrt(H)) v, its log-sum-exp, and the gradients of `sum(out * d_out)`.

    q [B, T, N, H], k [B, S, K, H], v [B, S, K, W] and d_out [B, T, N, W]; positions (default: the index) and
    segment_ids [B, T]. A query sees the keys of its own document, if `causal` at no later a position, of these the last
    `window`. `scale` stands for 1 / sqrt(H), and scores s become softcap * tanh(s / softcap).
    """
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    (B, T, N, H), (_, S, K, W) = q.shape, v.shape
    scale = H**-0.5 if scale is None else scale
    at = np.broadcast_to(np.arange(T) if positions is None else positions, (B, T))
    keys_at = at if S == T else np.broadcast_to(np.arange(S), (B, S))
    distance = at[:, :, None] - keys_at[:, None, :]
    visible = distance >= 0 if causal else np.ones(distance.shape, bool)
    if window is not None:
        visible &= distance < window
    if segment_ids is not None:
        visible &= segment_ids[:, :, None] == segment_ids[:, None, :]
    q, d_out = q.reshape(B, T, K, N // K, H), d_out.reshape(B, T, K, N // K, W)
    scores = np.einsum("BTKGH,BSKH->BKGTS", q, k) * scale
    slope = np.float64(1)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
        slope = 1 - (scores / softcap) ** 2
    scores = np.where(visible[:, None, None], scores, -np.inf)
    largest = scores.max(-1, keepdims=True)
    lse = largest + np.log(np.exp(scores - largest).sum(-1, keepdims=True))
    p = np.exp(scores - lse)
    out = np.einsum("BKGTS,BSKH->BTKGH", p, v)
    dv = np.einsum("BKGTS,BTKGH->BSKH", p, d_out)
    dp = np.einsum("BTKGH,BSKH->BKGTS", d_out, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * slope * scale
    dq = np.einsum("BKGTS,BSKH->BTKGH", ds, k)
    dk = np.einsum("BKGTS,BTKGH->BSKH", ds, q)
    return Dense(out.reshape(B, T, N, W), lse.reshape(B, N, T), dq.reshape(B, T, N, H), dk, dv)
