"""The attention reference against dense float64 numpy."""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest

from tests.attention_oracle import dense_attention
from ultrascale_jax.kernels.attention import attention, fused_attention
from ultrascale_jax.kernels.attention_mask import BlockMask

SEGMENTS = np.array([[1] * 5 + [2] * 8, [1] + [2] * 3 + [3] * 9], np.int32)
INDEX = np.arange(13, dtype=np.int32)
CASES = [(window, packed) for window in (None, 1, 4) for packed in (False, True)]


@pytest.fixture(params=[4, 2, 1], ids=["mha", "gqa", "mqa"])
def key_heads(request):
    return request.param


@functools.cache
def arrays(key_heads: int) -> list[np.ndarray]:
    """q, k, v and the cotangent of the result."""
    rng = np.random.default_rng(key_heads)
    return [rng.normal(size=(2, 13, n, 8)).astype(np.float32) for n in (4, key_heads, key_heads, 4)]


class Computed(NamedTuple):
    """Results to compare; pairs are `(result, gradients of q, k and v)`."""

    cases: list
    """A pair for each of `CASES`."""
    recomputed: tuple
    """The pair of documents without a window."""
    tail: jax.Array
    """The result of the queries from 9 on, without documents or a window."""


@functools.cache
def computed(key_heads: int) -> Computed:
    """Everything from one program: to compile many costs more."""

    @jax.jit
    def run(q, k, v, d_out):
        def pair(packed, **options):
            options["segment_ids"] = (SEGMENTS, SEGMENTS) if packed else None
            out, pull_back = jax.vjp(lambda *a: attention(*a, q_index=INDEX, **options), q, k, v)
            return out, pull_back(d_out)

        cases = [pair(packed, window=window) for window, packed in CASES]
        tail = attention(q[:, 9:], k, v, q_index=INDEX[9:])
        return Computed(cases, pair(True, recompute=True), tail)

    return run(*arrays(key_heads))


@pytest.mark.parametrize(("window", "packed"), CASES)
def test_reference_equals_dense_float64(key_heads, window, packed):
    out, gradients = computed(key_heads).cases[CASES.index((window, packed))]
    segments = SEGMENTS if packed else None
    expected = dense_attention(*arrays(key_heads), segment_ids=segments, window=window)
    wanted = expected.out, expected.dq, expected.dk, expected.dv
    for got, want in zip((out, *gradients), wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize("full", [False, True])
def test_sinks_and_a_window_that_is_chosen_at_run_time(full):
    """The path of cuDNN and Mosaic joins sinks to any blocks; the reference has a logit more in its softmax."""
    q, k, v, d_out = arrays(2)
    sinks, segments = np.array([-1.0, 0.0, 0.5, 3.0], np.float32), (SEGMENTS, SEGMENTS)

    @jax.jit
    def run(full, *arrays):
        def reference(q, k, v, sinks):
            options = {"segment_ids": segments, "window": 4, "full": full}
            return attention(q, k, v, q_index=INDEX, sinks=sinks, implementation="xla", **options)

        def by_blocks(q, k, v, sinks):
            mask = BlockMask(segment_ids=segments, causal=True, window=4)
            return fused_attention(q, k, v, sinks, mask, full, "xla")

        pairs = [jax.vjp(fn, *arrays) for fn in (reference, by_blocks)]
        return [(out, pull_back(d_out)) for out, pull_back in pairs]

    found, joined = run(full, q, k, v, sinks)
    dense = dense_attention(q, k, v, d_out, segment_ids=SEGMENTS, window=None if full else 4)
    share = 1 / (1 + np.exp(sinks[None, :, None] - dense.lse))
    np.testing.assert_allclose(found[0], dense.out * np.moveaxis(share, 1, 2)[..., None], atol=1e-5)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(joined), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(a).max(), rtol=0)


def test_recomputing_changes_no_gradient(key_heads):
    plain = computed(key_heads).cases[CASES.index((None, True))]
    leaves = jax.tree.leaves(plain), jax.tree.leaves(computed(key_heads).recomputed)
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
