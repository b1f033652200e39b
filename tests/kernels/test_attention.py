"""The attention reference against dense float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention_oracle import dense_attention
from ultrascale_jax.kernels.attention import attention


@pytest.fixture(params=[4, 2, 1], ids=["mha", "gqa", "mqa"])
def qkv(request):
    keys = jax.random.split(jax.random.key(request.param), 3)
    shapes = [(2, 13, 4, 8), (2, 13, request.param, 8), (2, 13, request.param, 8)]
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


SEGMENTS = np.array([[1] * 5 + [2] * 8, [1] + [2] * 3 + [3] * 9], np.int32)
INDEX = np.arange(13, dtype=np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_reference_equals_dense_float64(qkv, window, packed):
    segments = SEGMENTS if packed else None
    pair = (SEGMENTS, SEGMENTS) if packed else None
    d_out = jax.random.normal(jax.random.key(0), qkv[0].shape)
    out, pull_back = jax.vjp(
        lambda *qkv: attention(*qkv, q_index=INDEX, segment_ids=pair, window=window), *qkv
    )
    expected = dense_attention(*qkv, d_out, segment_ids=segments, window=window)
    gradients = expected.dq, expected.dk, expected.dv
    for got, want in zip((out, *pull_back(d_out)), (expected.out, *gradients), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_the_oracles_gradients_are_its_differences(qkv, which):
    qkv = [np.asarray(x, np.float64) for x in qkv]
    d_out, step = np.random.default_rng(0).normal(size=(2, *qkv[0].shape))
    step, options = step[:, :, : qkv[which].shape[2]], {"segment_ids": SEGMENTS, "window": 4}

    def total(distance):
        moved = [x + distance * step if i == which else x for i, x in enumerate(qkv)]
        return np.sum(dense_attention(*moved, d_out, **options).out * d_out)

    difference = (total(1e-5) - total(-1e-5)) / 2e-5
    gradient = dense_attention(*qkv, d_out, **options)[2 + which]
    np.testing.assert_allclose(np.sum(gradient * step), difference, rtol=1e-6)


@pytest.mark.slow
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
