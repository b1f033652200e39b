"""Attention over packed documents by classes of lengths, and of a ring's blocks by theirs, against float64 numpy.

cuDNN needs a GPU; a float64 numpy model of its two operations stands in for the primitives that JAX has for them. It
reads and writes as cuDNN documents its ragged layout: a sequence's tokens are its length's elements from its offset on,
and nothing else is read. What belongs to no sequence it fills with wrong numbers.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention_oracle import dense_attention
from ultrascale_jax.kernels import (
    attention_cudnn,
    attention_xla,
    document_classes,
)
from ultrascale_jax.kernels.attention import add_sinks, fused_attention
from ultrascale_jax.kernels.attention_cudnn import private
from ultrascale_jax.kernels.attention_mask import PLAIN_SCORES, BlockMask
from ultrascale_jax.kernels.document_classes import max_documents

B, T, N, K, H = 2, 64, 4, 2, 8
WRONG = 1e3
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


def tokens_of(x, lengths, offsets) -> list[np.ndarray]:
    """Views `[length, heads, H]` of the sequences in `x`; offsets count elements, and one may follow the last."""
    flat, width = x.reshape(-1), x.shape[2] * x.shape[3]
    pairs = zip(lengths.reshape(-1), offsets.reshape(-1), strict=False)
    return [flat[at : at + n * width].reshape(n, *x.shape[2:]) for n, at in pairs]


def scores_of(q, k, causal) -> np.ndarray:
    """Scores `[N, T, S]` of one sequence."""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scores = np.einsum("TNH,SNH->NTS", q, k) / np.sqrt(q.shape[2])
    return np.where(np.tri(len(q), len(k), dtype=bool) | (not causal), scores, -np.inf)


def forward(q, k, v, q_lengths, kv_lengths, q_offsets, kv_offsets, *, causal):
    """Result, and log-sum-exp `[sequences, N, T]`."""
    out, lse = np.full(q.shape, WRONG), np.full((q_lengths.size, q.shape[2], q.shape[1]), WRONG)
    given = (q, q_lengths, q_offsets), (k, kv_lengths, kv_offsets), (v, kv_lengths, kv_offsets)
    written = tokens_of(out, q_lengths, q_offsets)
    parts = (tokens_of(*ragged) for ragged in given)
    for row, own, q_T, k_S, v_S in zip(lse, written, *parts, strict=True):
        scores = scores_of(q_T, k_S, causal)
        row[:, : len(q_T)] = np.logaddexp.reduce(scores, axis=-1)
        p = np.exp(scores - row[:, : len(q_T), None])
        own[:] = np.einsum("NTS,SNH->TNH", p, np.repeat(v_S, q.shape[2] // v.shape[2], axis=1))
    return out, lse


def backward(q, k, v, lse, out, dout, q_lengths, kv_lengths, q_offsets, kv_offsets, *, causal):
    """Gradients from the given result and log-sum-exp, as cuDNN's: wrong ones give wrong gradients."""
    N, K, H = q.shape[2], k.shape[2], q.shape[3]
    gradients = [np.full(x.shape, WRONG) for x in (q, k, v)]
    by_queries = (tokens_of(x, q_lengths, q_offsets) for x in (gradients[0], q, out, dout))
    by_keys = (tokens_of(x, kv_lengths, kv_offsets) for x in (*gradients[1:], k, v))
    for row, dq, q_T, out_T, dout_T, dk, dv, k_S, v_S in zip(
        lse, *by_queries, *by_keys, strict=True
    ):
        p = np.exp(scores_of(q_T, k_S, causal) - row[:, : len(q_T), None])
        dp = np.einsum("TNH,SNH->NTS", dout_T, np.repeat(v_S, N // K, axis=1))
        ds = p * (dp - np.einsum("TNH,TNH->NT", dout_T, out_T)[..., None]) / np.sqrt(H)
        dq[:] = np.einsum("NTS,SNH->TNH", ds, np.repeat(k_S, N // K, axis=1))
        for own, weights, x_T in ((dk, ds, q_T), (dv, p, dout_T)):
            each = np.einsum("NTS,TNH->SNH", weights, x_T)
            own[:] = each.reshape(len(k_S), K, N // K, H).sum(2)
    return tuple(gradients)


def stand_in(model):
    """Return a primitive for `attention_cudnn.py` to bind, which `model` computes."""

    def bind(q, k, v, bias, *rest, mask_type, scale, **params):
        causal = mask_type == private.MaskType.PADDING_CAUSAL
        assert (causal or mask_type == private.MaskType.PADDING) and scale == H**-0.5
        assert params["layout"] == private.AttentionLayout.BTNH.value
        ragged, more = rest[:4], rest[6:]  # between them stand tables of pages
        if not causal:  # each row has a length of queries and one of keys, from its start on
            rows = jnp.arange(q.shape[0])
            ragged = *ragged[:2], *(rows * (x[0].size) for x in (q, k))
        lse = jax.ShapeDtypeStruct((ragged[0].size, q.shape[2], q.shape[1]), q.dtype)
        results = (q, k, v) if more else (q, lse)
        shapes = [jax.ShapeDtypeStruct(x.shape, q.dtype) for x in results]
        return jax.pure_callback(on_numpy(model, causal), shapes, q, k, v, *more, *ragged)

    return types.SimpleNamespace(bind=bind)


def on_numpy(model, causal):
    return lambda *arrays: model(*map(np.asarray, arrays), causal=causal)


@pytest.fixture(autouse=True)
def numpy_for_cudnn(monkeypatch):
    for model, name in ((forward, "fwd_p"), (backward, "bwd_p")):
        for wrapper in ("", "_wrapper"):
            name_of = f"_dot_product_attention_{name}{wrapper}"
            monkeypatch.setattr(private, name_of, stand_in(model))
    # The choice looks for a GPU.
    monkeypatch.setattr("ultrascale_jax.kernels.attention.choose", lambda *_, **__: "cudnn_packed")
    with jax.enable_x64(True):
        yield


@functools.cache
def compiled():
    @jax.jit
    def run(q, k, v, d_out, ids):
        mask = BlockMask(segment_ids=(ids, ids), causal=True)
        attend = lambda *a: fused_attention(*a, None, mask, None, "cudnn_packed")  # noqa: E731
        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(d_out)

    return run


def arrays():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(B, T, n, H)) for n in (N, K, K, N)]


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_packed_attention_equals_dense_float64(rows):
    ids = ids_of(rows)
    expected = dense_attention(*arrays(), segment_ids=ids)
    wanted = expected.out, expected.dq, expected.dk, expected.dv
    for got, want in zip(compiled()(*arrays(), ids), wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-13 * np.abs(want).max(), rtol=0)


def test_documents_beyond_the_room_are_nan_and_the_others_right():
    ids = ids_of([[1] * 64, [1] * 10 + [54]])
    out = compiled()(*arrays(), ids)[0]
    beyond = np.isnan(out).all((2, 3))
    assert beyond.sum() == 64 + 10 - B * max_documents(T)
    expected = dense_attention(*arrays(), segment_ids=ids).out
    np.testing.assert_allclose(out[~beyond], expected[~beyond], atol=1e-13)


@pytest.mark.parametrize("lengths", [((24, 9), (64, 5)), ((0, 64), (0, 1))])
def test_a_block_by_lengths_is_the_definition_and_keeps_nothing_that_cudnn_leaves_open(lengths):
    q, k, v, d_out = map(jnp.asarray, arrays())
    mask = BlockMask(lengths=tuple(jnp.array(x, jnp.int32) for x in lengths))
    seen = np.arange(T) < np.array(lengths[0])[:, None]
    out, lse = attention_cudnn.forward(q, k, v, mask, PLAIN_SCORES)
    want_out, want_lse = attention_xla.forward(q, k, v, mask, PLAIN_SCORES)
    np.testing.assert_allclose(np.where(seen[:, None], lse - want_lse, 0), 0, atol=1e-5)
    assert (np.asarray(lse)[~np.broadcast_to(seen[:, None], lse.shape)] == -1e30).all()
    np.testing.assert_allclose(out, np.where(seen[:, :, None, None], want_out, 0), atol=1e-5)
    # The backward pass has the result and the log-sum-exp of all blocks: here one more, of value zero.
    joined = add_sinks(want_out, want_lse, jnp.zeros(N))
    both = [
        module.backward(q, k, v, *joined, d_out, mask, PLAIN_SCORES)
        for module in (attention_cudnn, attention_xla)
    ]
    for got, want in zip(*both, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
