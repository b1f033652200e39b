"""Compute the gated delta rule in chunks of C tokens, so that nearly all of it is products of matrices.

With G the sums of the logarithms of decays from the chunk's beginning, a chunk that begins with the state S computes

    T = (I + A)^-1      A_ij = beta_i k_i.k_j exp(G_i - G_j) for j < i
    new = T (beta v) - T (beta exp(G) k) S                       the corrections that its tokens write, `[C, W]`
    out = (exp(G) q) S + (q k^T exp(G_i - G_j), j <= i) new
    S' = exp(G_C) S + (exp(G_C - G) k)^T new

(the WY form, arXiv 2406.06484). All but S is computed before, for many chunks at once (`prepare`); from chunk to chunk
there are two products, in both passes (`_recur`). In `einsum` b are rows, c chunks, t and s tokens, k key heads, r the
value heads of each, h and w the widths of keys and values.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

LEAST_LOG_DECAY = -512.0
"""A decay that is 0 in float32; sums of it over a chunk keep their last digits (`_decay_sums`)."""

LEAF = 16
"""Size of the triangular matrices that are inverted by products of whole matrices."""


class Tokens(NamedTuple):
    """Tokens of consecutive chunks: `[b, c, t, ...]`."""

    query: jax.Array
    """`[..., k, h]`."""
    key: jax.Array
    """`[..., k, h]`."""
    value: jax.Array
    """`[..., k, r, w]`."""
    log_decay: jax.Array
    """`[..., k, r]` float32."""
    beta: jax.Array
    """`[..., k, r]`."""


class Chunks(NamedTuple):
    """What chunks compute without the state, `[c, b, k, r, ...]`; products in the type of the inputs."""

    queries: jax.Array
    """`[t, h]` that read the state at the chunk's beginning."""
    keys: jax.Array
    """`[t, h]`, decayed until the chunk's end."""
    values: jax.Array
    """`[t, w]`: corrections if the state were 0."""
    reads: jax.Array
    """`[t, h]`: times the state they are the other part of the corrections."""
    scores: jax.Array
    """`[t, s]` of outputs and corrections."""
    decay: jax.Array
    """`[]` of the state over the chunk, float32."""


def prepare(tokens: Tokens, begins: jax.Array) -> Chunks:
    """Compute what needs no state; `begins` `[b, c, t]` bool says where a document begins and the state is 0."""
    q, k, v, log_decay, beta = tokens
    dtype = k.dtype
    sums = [jnp.einsum("bctkr->cbkrt", x) for x in _decay_sums(log_decay)]
    beta = jnp.einsum("bctkr->cbkrt", beta.astype(jnp.float32))
    document = jnp.moveaxis(jnp.cumsum(begins, axis=2, dtype=jnp.int32), 1, 0)[:, :, None, None]
    together = document[..., :, None] == document[..., None, :]
    pair_decay = _exp(jnp.tril(together), *(x[..., :, None] - x[..., None, :] for x in sums))
    from_start = _exp(document == 0, *sums)
    to_end = _exp(document == document[..., -1:], *(x[..., -1:] - x for x in sums))

    def pairs(x):
        return _product("bctkh,bcskh->cbkts", x, k)[:, :, :, None] * pair_decay

    T = unit_lower_inverse(jnp.tril(pairs(k), -1) * beta[..., :, None])
    written = (T * beta[..., None, :]).astype(dtype)
    read = (T * -(beta * from_start)[..., None, :]).astype(dtype)
    k_cbkth, q_cbkth = (jnp.einsum("bctkh->cbkth", x)[:, :, :, None] for x in (k, q))
    return Chunks(
        queries=(q_cbkth * from_start[..., None]).astype(dtype),
        keys=(k_cbkth * to_end[..., None]).astype(dtype),
        values=_product("cbkrts,bcskrw->cbkrtw", written, v).astype(dtype),
        reads=_product("cbkrts,bcskh->cbkrth", read, k).astype(dtype),
        scores=pairs(q).astype(dtype),
        decay=from_start[..., -1],
    )


def forward(chunks: Chunks, state: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the state after the chunks; their states at the beginning `[c, b, k, r, h, w]`, and corrections.

    The state `[b, k, r, h, w]` float32 may have more columns than values, which only decay and are corrected.
    """
    moves = chunks.decay, chunks.values, chunks.reads, chunks.keys, None
    return _recur(*moves, state)


def outputs(chunks: Chunks, states: jax.Array, corrections: jax.Array) -> jax.Array:
    """Return the outputs `[b, c, t, k, r, w]`."""
    read = _product("cbkrth,cbkrhw->bctkrw", chunks.queries, states)
    out = read + _product("cbkrts,cbkrsw->bctkrw", chunks.scores, corrections)
    return out.astype(corrections.dtype)


def backward(
    chunks: Chunks, d_out: jax.Array, d_state: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the gradient of the state before the chunks; those of their states at the end, and of corrections.

    `d_out` is `[b, c, t, k, r, w]`, `d_state` the gradient of the state after the chunks, as wide as in `forward`.
    """
    d_new = _product("cbkrts,bctkrw->cbkrsw", chunks.scores, d_out).astype(d_out.dtype)
    d_read = _product("cbkrth,bctkrw->cbkrhw", chunks.queries, d_out)
    moves = chunks.decay, d_new, chunks.keys, chunks.reads, d_read
    return _recur(*moves, d_state, reverse=True)


def pull_back(d_state: jax.Array, tokens: Tokens, begins: jax.Array, state: jax.Array, d_out):
    """Return the gradients of the state before these tokens and of the tokens; arguments are as of `backward`."""
    chunks, pull = jax.vjp(lambda tokens: prepare(tokens, begins), tokens)
    _, (states, corrections) = forward(chunks, state)
    d_state, (d_ends, d_new) = backward(chunks, d_out, d_state)

    def product(subscripts, x, y):
        return _product(subscripts, x, y).astype(x.dtype)

    d_chunks = Chunks(
        queries=product("bctkrw,cbkrhw->cbkrth", d_out, states),
        keys=product("cbkrtw,cbkrhw->cbkrth", corrections, d_ends),
        values=d_new,
        reads=product("cbkrtw,cbkrhw->cbkrth", d_new, states),
        scores=product("bctkrw,cbkrsw->cbkrts", d_out, corrections),
        decay=_product("cbkrhw,cbkrhw->cbkr", states, d_ends),
    )
    return d_state, pull(d_chunks)[0]


def _recur(decay, values, reads, keys, added, state, *, reverse=False):
    """Go from chunk to chunk: `new = values + reads S`, `S = decay S + added + keys^T new`.

    Returns the last S; each chunk's S before it, and new.
    """
    missing = state.shape[-1] - values.shape[-1]
    values, added = (
        x if x is None else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
        for x in (values, added)
    )

    def step(S, chunk):
        decay, values, reads, keys, added = chunk
        before = S.astype(values.dtype)
        new = (values + _product("bkrth,bkrhw->bkrtw", reads, before)).astype(values.dtype)
        S = S * decay[..., None, None] + _product("bkrth,bkrtw->bkrhw", keys, new)
        return S if added is None else S + added, (before, new)

    return jax.lax.scan(step, state, (decay, values, reads, keys, added), reverse=reverse)


def _product(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _decay_sums(log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two parts of the sums over the tokens t of each chunk, whose differences are accurate.

    The first is of multiples of 1/256, and exact: so a token that forgets all leaves the decays after it as they are.
    """
    log_decay = jnp.maximum(log_decay.astype(jnp.float32), LEAST_LOG_DECAY)
    coarse = jax.lax.stop_gradient(jnp.round(log_decay * 256) / 256)
    return jnp.cumsum(coarse, axis=2), jnp.cumsum(log_decay - coarse, axis=2)


def _exp(keep: jax.Array, coarse: jax.Array, fine: jax.Array) -> jax.Array:
    """Return the exponential of the sum where `keep` holds, else 0."""
    return jnp.where(keep, jnp.exp(jnp.where(keep, coarse + fine, 0)), 0)


@jax.custom_vjp
def unit_lower_inverse(A: jax.Array) -> jax.Array:
    """Return (I + A)^-1 of strictly lower triangular matrices `[..., C, C]` float32, C a power of 2.

    By blocks, as the inverse of a triangle has those of its two halves: products of powers of A would cancel, if keys
    repeat.
    """
    return _inverse(A)


def _inverse(A: jax.Array) -> jax.Array:
    if A.shape[-1] <= LEAF:
        return _leaf_inverse(A)
    half = A.shape[-1] // 2
    first, second = _inverse(jnp.stack([A[..., :half, :half], A[..., half:, half:]]))
    below = -_exact(_exact(second, A[..., half:, :half]), first)
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, second], axis=-1)], axis=-2)


def _leaf_inverse(A: jax.Array) -> jax.Array:
    """Invert I + A by the same rule on whole matrices, masked to the blocks below the diagonal."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, A.shape, A.ndim - axis) for axis in (2, 1))

    def below(size: int) -> jax.Array:
        is_below = (row // size == column // size + 1) & (row // size % 2 == 1)
        return jnp.where(is_below, A, 0)

    T, size = (row == column) - below(1), 2
    while size < A.shape[-1]:
        T = T - _exact(_exact(T, below(size)), T)
        size *= 2
    return T


def _inverse_bwd(T, dT):
    transposed = jnp.swapaxes(T, -1, -2)
    return (-_exact(_exact(transposed, dT), transposed),)


unit_lower_inverse.defvjp(lambda A: (_inverse(A),) * 2, _inverse_bwd)

_exact = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
