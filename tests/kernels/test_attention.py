"""The attention reference against dense float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultrascale_jax.kernels.attention import attention


def dense(q, k, v, segments=None, window=None):
    """The definition, one row and head at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (B, T, N, H), K = q.shape, k.shape[2]
    out = np.zeros_like(q)
    for b, n, t in np.ndindex(B, N, T):
        seen = [
            s
            for s in range(t + 1)
            if (window is None or t - s < window)
            and (segments is None or segments[b, s] == segments[b, t])
        ]
        scores = k[b, seen, n // (N // K)] @ q[b, t, n] / np.sqrt(H)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights @ v[b, seen, n // (N // K)] / weights.sum()
    return out


@pytest.fixture(params=[4, 2, 1], ids=["mha", "gqa", "mqa"])
def qkv(request):
    keys = jax.random.split(jax.random.key(request.param), 3)
    shapes = [(2, 13, 4, 8), (2, 13, request.param, 8), (2, 13, request.param, 8)]
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


SEGMENTS = np.array([[1] * 5 + [2] * 8, [1] + [2] * 3 + [3] * 9], np.int32)
INDEX = np.arange(13, dtype=np.int32)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_reference_equals_dense_float64(qkv, window, packed):
    segments = (SEGMENTS, SEGMENTS) if packed else None
    out = attention(*qkv, q_index=INDEX, segment_ids=segments, window=window)
    expected = dense(*qkv, SEGMENTS if packed else None, window)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_recomputing_changes_no_gradient(qkv):
    def loss(recompute):
        return lambda *qkv: jnp.sum(
            jnp.sin(
                attention(
                    *qkv, q_index=INDEX, segment_ids=(SEGMENTS, SEGMENTS), recompute=recompute
                )
            )
        )

    plain = jax.grad(loss(False), (0, 1, 2))(*qkv)
    recomputed = jax.grad(loss(True), (0, 1, 2))(*qkv)
    for a, b in zip(plain, recomputed, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_queries_may_start_later_than_keys(qkv):
    q, k, v = qkv
    whole = attention(q, k, v, q_index=INDEX)
    tail = attention(q[:, 9:], k, v, q_index=INDEX[9:])
    np.testing.assert_allclose(tail, whole[:, 9:], atol=1e-6)


def test_forced_cudnn_fails_loudly_without_a_gpu(qkv):
    with pytest.raises(ValueError, match=r"model\.attention='cudnn'"):
        attention(*qkv, q_index=INDEX, implementation="cudnn")
