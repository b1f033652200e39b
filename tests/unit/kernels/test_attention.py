"""The attention reference against dense float64 numpy."""

import functools

import jax
import numpy as np
import pytest

from tests.attention_oracle import dense_attention
from ultrascale_jax.kernels.attention import attention, fused_attention
from ultrascale_jax.kernels.attention_mask import BlockMask

SEGMENTS = np.array([[1] * 5 + [2] * 8, [1] + [2] * 3 + [3] * 9], np.int32)
INDEX = np.arange(13, dtype=np.int32)
CASES = [(window, packed, False) for window in (None, 1, 4) for packed in (False, True)]
CASES += [(None, True, True)]


@functools.cache
def arrays() -> list[np.ndarray]:
    """q, k, v and the cotangent of the result."""
    rng = np.random.default_rng(2)
    return [rng.normal(size=(2, 13, n, 8)).astype(np.float32) for n in (4, 2, 2, 4)]


@functools.cache
def computed() -> list[tuple]:
    """Results, and gradients of q, k and v, of `CASES`, from one program: to compile many costs more."""

    @jax.jit
    def run(q, k, v, d_out):
        def pair(window, packed, recompute):
            options = {"segment_ids": (SEGMENTS, SEGMENTS) if packed else None}
            options |= {"window": window, "recompute": recompute}
            out, pull_back = jax.vjp(lambda *a: attention(*a, q_index=INDEX, **options), q, k, v)
            return out, *pull_back(d_out)

        return [pair(*case) for case in CASES]

    return run(*arrays())


@pytest.mark.parametrize(("window", "packed", "recompute"), CASES)
def test_reference_equals_dense_float64(window, packed, recompute):
    """Parity has other numbers of heads: `tests/parity/parallel/test_context.py`."""
    found = computed()[CASES.index((window, packed, recompute))]
    segments = SEGMENTS if packed else None
    expected = dense_attention(*arrays(), segment_ids=segments, window=window)
    wanted = expected.out, expected.dq, expected.dk, expected.dv
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize("full", [False, True])
def test_sinks_and_a_window_that_is_chosen_at_run_time(full):
    """The path of cuDNN and Mosaic joins sinks to any blocks; the reference has a logit more in its softmax."""
    q, k, v, d_out = arrays()
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
