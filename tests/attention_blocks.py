"""Blocks of attention for the kernel of documents and rings: what calls it, and what the oracle says."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.attention_oracle import Dense, dense_attention
from tests.gpu_kernels import compile_for, relative
from ultrascale_jax.kernels import attention_mosaic as mosaic
from ultrascale_jax.kernels.attention_mask import BlockMask


class Case(NamedTuple):
    """Arrays as for one call, the documents `[1, T]`, and what the oracle says."""

    arrays: list[np.ndarray]
    ids: np.ndarray
    window: int | None
    want: Dense


def case(shape, lengths, window=None, dtype=jnp.bfloat16, scale=None) -> Case:
    """Documents of these lengths."""
    B, tokens, N, K, H = shape
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(B, tokens, n, H)).astype(dtype) for n in (N, K, K, N)]
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
    want = dense_attention(*arrays, segment_ids=ids, window=window, scale=scale)
    return Case(arrays, ids, window, want)


def whole(case: Case, forward, backward):
    """A function of the arrays: result, log-sum-exp and gradients of one block."""
    index, pair = np.arange(case.ids.size), (case.ids, case.ids)

    def run(q, k, v, dout):
        mask = BlockMask(positions=(index, index), segment_ids=pair, window=case.window)
        out, lse = forward(q, k, v, mask)
        return out, lse, *backward(q, k, v, out, lse, dout, mask)

    return run


def joined(case: Case, forward, backward, cut: int):
    """The same of two blocks of keys, as a ring has them; and the first one's mask, result and log-sum-exp."""
    index, ids = np.arange(case.ids.size), case.ids

    def run(q, k, v, dout):
        blocks = [
            (
                k[:, keys],
                v[:, keys],
                BlockMask(
                    positions=(index, index[keys]),
                    segment_ids=(ids, ids[:, keys]),
                    window=case.window,
                ),
            )
            for keys in (slice(0, cut), slice(cut, None))
        ]
        parts = [forward(q, k, v, mask) for k, v, mask in blocks]
        lse = jnp.logaddexp(parts[0][1], parts[1][1])
        shares = [jnp.moveaxis(jnp.exp(part[1] - lse), 1, 2)[..., None] for part in parts]
        first, second = (part[0] * share for part, share in zip(parts, shares, strict=True))
        out = (first + second).astype(q.dtype)
        gradients = [backward(q, k, v, out, lse, dout, mask) for k, v, mask in blocks]
        dqs, *others = ([x.astype(jnp.float32) for x in xs] for xs in zip(*gradients, strict=True))
        gradients = sum(dqs), *(jnp.concatenate(xs, axis=1) for xs in others)
        return (out, lse, *gradients), (blocks[0][2].by_arrays(), *parts[0])

    return run


def check_joined(got, want, errors) -> None:
    """As `check`; and there are queries that see nothing of the first block."""
    result, (visible, out, lse) = got
    unseen = ~np.asarray(visible).any(2)[0]
    assert unseen.any() and np.all(np.isfinite(np.asarray(out, np.float32)))
    assert np.all(np.asarray(lse)[:, :, unseen] < -1e29)
    check(result, want, errors)


def check(got, want, errors) -> None:
    """`errors` allowed: relative of the result, absolute of the log-sum-exp, relative of gradients."""
    np.testing.assert_allclose(got[1], want.lse, atol=errors[1], rtol=0)
    assert relative(got[0], want.out) < errors[0]
    for gradient, wanted in zip(got[2:], (want.dq, want.dk, want.dv), strict=True):
        assert relative(gradient, wanted) < errors[2]


EXACT, ROUNDED = (1e-6, 1e-5, 1e-6), (4e-3, 1e-3, 1e-2)


# As the GPU interpreter takes them.
KERNEL = [functools.partial(run, staged=True) for run in (mosaic.forward, mosaic.backward)]


def compile_attention(mesh, run, spec, shape, tokens: int, rows: int):
    """Compile result and gradients of `run(q, k, v, segment_ids)` on each of the devices, `[rows, tokens]` on all."""
    _, _, N, K, H = shape

    def with_gradients(q, k, v, dout, ids):
        out, pull_back = jax.vjp(lambda q, k, v: run(q, k, v, ids), q, k, v)
        return out, *pull_back(dout)

    arrays = [((rows, tokens, n, H), jnp.bfloat16) for n in (N, K, K, N)]
    arrays += [((rows, tokens), jnp.int32)]
    return compile_for(mesh, with_gradients, arrays, (spec,) * 5, (spec,) * 4)


LLAMA3_8B = (1, 8192, 32, 8, 128)
"""Batch, tokens, heads of queries and of keys, head dim."""
