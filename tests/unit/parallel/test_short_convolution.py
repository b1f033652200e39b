"""The short convolution of linear attention is numpy's, document by document."""

import jax
import jax.numpy as jnp
import numpy as np

from ultrascale_jax.config import ContextConfig
from ultrascale_jax.parallel.context.short_convolution import short_convolution

B, T, K, H, O = 2, 11, 2, 3, 4  # noqa: E741
RNG = np.random.default_rng(0)
X, TAPS = RNG.normal(size=(B, T, K, H)), RNG.normal(size=(K, H, O))


def expected(x, taps, ids):
    y = np.zeros_like(x)
    for b, t, o in np.ndindex(B, x.shape[1], O):
        source = t - O + 1 + o
        if source >= 0 and ids[b, source] == ids[b, t]:
            y[b, t] += taps[..., o] * x[b, source]
    return y


def convolve(x, ids=None, before=None, bias=None):
    arrays = (jnp.asarray(x, jnp.float32), jnp.asarray(TAPS, jnp.float32), "BTKH")
    return short_convolution(*arrays, ids, ContextConfig(), before, bias, jnp.tanh)


def test_each_document_is_convolved_as_if_it_stood_alone():
    ids = np.array([[0] * 5 + [1] * 6, [0] * 2 + [1] + [2] * 8])
    found = jax.jit(convolve)(X, jnp.asarray(ids))
    np.testing.assert_allclose(found, np.tanh(expected(X, TAPS, ids)), rtol=1e-5, atol=1e-6)
    whole = np.zeros((B, T), int)
    np.testing.assert_allclose(convolve(X), np.tanh(expected(X, TAPS, whole)), rtol=1e-5, atol=1e-6)
    bias = RNG.normal(size=(K, H)).astype(np.float32)
    sums = expected(X, TAPS, whole) + bias
    np.testing.assert_allclose(convolve(X, bias=bias), np.tanh(sums), rtol=1e-5, atol=1e-6)


def test_the_tokens_before_continue_a_sequence():
    before = jnp.asarray(X[:, 4:7], jnp.float32)
    np.testing.assert_allclose(convolve(X[:, 7:], before=before), convolve(X)[:, 7:], rtol=1e-6)


def test_its_gradient_is_the_derivative():
    gradient = jax.grad(lambda x: jnp.sum(convolve(x)[:, 5:]))(jnp.asarray(X, jnp.float32))
    step = 1e-5 * RNG.normal(size=X.shape)
    ends = [np.tanh(expected(X + sign * step, TAPS, np.zeros((B, T), int))) for sign in (1, -1)]
    difference = (ends[0] - ends[1])[:, 5:].sum() / 2
    np.testing.assert_allclose(np.sum(np.asarray(gradient) * step), difference, rtol=1e-5)
