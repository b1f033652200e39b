"""Attention over packed documents by classes of lengths, against dense float64 numpy.

cuDNN needs a GPU; a model of its ragged layout in jnp stands in for its two calls. Like cuDNN it reads tokens through
lengths and starts alone, and writes those of its segments alone: the others are wrong numbers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention_oracle import dense_attention
from ultrascale_jax.kernels import document_classes
from ultrascale_jax.kernels.attention_packed import Ragged, packed_attention
from ultrascale_jax.kernels.document_classes import max_documents

B, T, N, K, H = 2, 64, 4, 2, 8
ROWS = {
    "one document": [[64], [64]],
    "the borders of the classes": [[1, 3, 4, 5, 15, 16, 17, 3], [16, 16, 16, 16]],
    "as many as there is room for": [[2] * 32, [2] * 32],
    "one long among short ones": [[3, 2, 3, 50, 1, 5], [20, 1, 1, 1, 41]],
}


@pytest.fixture(autouse=True)
def short_classes(monkeypatch):
    monkeypatch.setattr(document_classes, "SHORTEST", 4)
    monkeypatch.setattr(document_classes, "SHORTEST_MEAN", 2)
    monkeypatch.setattr(document_classes, "RATIO", 2)


def ids_of(rows) -> np.ndarray:
    return np.stack([np.repeat(np.arange(1, len(row) + 1), row) for row in rows]).astype(np.int32)


def gathered(x, lengths, starts):
    """The segments of `[R, L, N, H]`, `[R M, L, N, H]`, and where their tokens are, past the end for none."""
    flat, place = x.reshape(-1, *x.shape[2:]), jnp.arange(x.shape[1])[None]
    first = starts.reshape(-1, 1)[: lengths.size]
    at = jnp.where(place < lengths.reshape(-1, 1), first + place, flat.shape[0])
    return jnp.take(flat, at, axis=0, mode="fill", fill_value=0), at


def scattered(x_SLNH, at, like):
    flat = jnp.full((like.shape[0] * like.shape[1], *like.shape[2:]), 1e3, like.dtype)
    return flat.at[at].set(x_SLNH, mode="drop").reshape(like.shape)


def masked_scores(q_SLNH, k_SLNH, at, tokens):
    scores = jnp.einsum("SLNH,SMNH->SNLM", q_SLNH, k_SLNH) * q_SLNH.shape[3] ** -0.5
    seen = (at < tokens)[:, None, None] & jnp.tri(at.shape[1], dtype=bool)[None, None]
    return jnp.where(seen, scores, -1e30)


def forward(q, k, v, lengths, starts):
    (q_S, at), (k_S, _), (v_S, _) = (gathered(x, lengths, starts) for x in (q, k, v))
    k_N, v_N = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k_S, v_S))
    scores = masked_scores(q_S, k_N, at, q.shape[0] * q.shape[1])
    lse = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("SNLM,SMNH->SLNH", jnp.exp(scores - lse[..., None]), v_N)
    return scattered(out, at, q), lse


def backward(q, k, v, out, lse, dout, lengths, starts):
    """From the given result and log-sum-exp, as cuDNN's: wrong ones give wrong gradients."""
    arrays = [gathered(x, lengths, starts)[0] for x in (q, k, v, out, dout)]
    (q_S, k_S, v_S, out_S, dout_S), at = arrays, gathered(q, lengths, starts)[1]
    groups = q.shape[2] // k.shape[2]
    k_N, v_N = (jnp.repeat(x, groups, axis=2) for x in (k_S, v_S))
    scores = masked_scores(q_S, k_N, at, q.shape[0] * q.shape[1])
    p = jnp.exp(scores - lse[..., None])
    dp = jnp.einsum("SLNH,SMNH->SNLM", dout_S, v_N)
    delta = jnp.einsum("SLNH,SLNH->SNL", dout_S, out_S)
    ds = p * (dp - delta[..., None]) * q.shape[3] ** -0.5
    dq = jnp.einsum("SNLM,SMNH->SLNH", ds, k_N)
    dk, dv = (
        x.reshape(*k_S.shape[:3], groups, -1).sum(3)
        for x in (jnp.einsum("SNLM,SLNH->SMNH", ds, q_S), jnp.einsum("SNLM,SLNH->SMNH", p, dout_S))
    )
    return scattered(dq, at, q), scattered(dk, at, k), scattered(dv, at, v)


MODEL = Ragged(forward, backward)


@functools.cache
def compiled():
    @jax.jit
    def run(q, k, v, d_out, ids):
        out, pull_back = jax.vjp(lambda *a: packed_attention(*a, ids, MODEL), q, k, v)
        return out, *pull_back(d_out)

    return run


def arrays():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(B, T, n, H)).astype(np.float32) for n in (N, K, K, N)]


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_packed_attention_equals_dense_float64(rows):
    ids = ids_of(rows)
    expected = dense_attention(*arrays(), segment_ids=ids)
    wanted = expected.out, expected.dq, expected.dk, expected.dv
    for got, want in zip(compiled()(*arrays(), ids), wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)


def test_documents_beyond_the_room_are_nan_and_the_others_right():
    ids = ids_of([[1] * 64, [1] * 10 + [54]])
    out = compiled()(*arrays(), ids)[0]
    beyond = np.isnan(out).all((2, 3))
    assert beyond.sum() == 64 + 10 - B * max_documents(T)
    expected = dense_attention(*arrays(), segment_ids=ids).out
    np.testing.assert_allclose(out[~beyond], expected[~beyond], atol=1e-5)
