"""Compute the gated delta rule in chunks of C tokens, so that nearly all of it is products of matrices.

With G the sums of the logarithms of decays from the chunk's beginning, a chunk that begins with the state S computes

    T = (I + A)^-1      A_ij = beta_i k_i.k_j exp(G_i - G_j) for j < i
    new = T (beta v) - T (beta exp(G) k) S                       the corrections that its tokens write, `[C, W]`
    out = (exp(G) q) S + (q k^T exp(G_i - G_j), j <= i) new
    S' = exp(G_C) S + (exp(G_C - G) k)^T new

(the WY form, arXiv 2406.06484), so S' = M S + B with two matrices that need no S. They are computed before, for many
chunks at once (`prepare`, `change`); from chunk to chunk there is one product, in both passes (`recur`). Without the
delta the corrections are beta v, and M is a number (as in Mamba-2, arXiv 2405.21060). In `einsum` b are rows, c chunks,
t and s tokens, k key heads, r the value heads of each, h and w the widths of keys and values.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

LEAST_LOG_DECAY = -512.0
"""A decay that is 0 in float32; sums of it over a chunk keep their last digits (`_decay_sums`)."""

LEAF = 16
"""Size of the triangular matrices that are inverted by products of full matrices."""

UNROLL = 8
"""Chunks of an iteration: 13.9 instead of 15.7 ms for both passes over 8,192 tokens and 32 heads (simulated, H100)."""


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
    """Results of chunks that need no state, `[c, b, k, r, ...]`; products in the type of the inputs."""

    queries: jax.Array
    """`[t, h]` that read the state at the chunk's beginning."""
    keys: jax.Array
    """`[t, h]`, decayed until the chunk's end."""
    values: jax.Array
    """`[t, w]`: corrections if the state were 0."""
    reads: jax.Array | None
    """`[t, h]`: times the state they are the other part of the corrections, if there is one."""
    scores: jax.Array
    """`[t, s]` of outputs and corrections."""
    decay: jax.Array
    """`[]` of the state over the chunk, float32."""


def prepare(tokens: Tokens, begins: jax.Array, delta: bool) -> Chunks:
    """Compute what needs no state; `begins` `[b, c, t]` bool says where a document begins and the state is 0."""
    q, k, v, log_decay, beta = tokens
    dtype = k.dtype
    sums = [jnp.einsum("bctkr->cbkrt", x) for x in _decay_sums(log_decay)]
    beta = jnp.einsum("bctkr->cbkrt", beta.astype(jnp.float32))
    document = jnp.moveaxis(jnp.cumsum(begins, axis=2, dtype=jnp.int32), 1, 0)[:, :, None, None]
    same_document = document[..., :, None] == document[..., None, :]
    pair_decay = _exp(jnp.tril(same_document), *(x[..., :, None] - x[..., None, :] for x in sums))
    from_start = _exp(document == 0, *sums)
    to_end = _exp(document == document[..., -1:], *(x[..., -1:] - x for x in sums))

    def pairs(x):
        return product("bctkh,bcskh->cbkts", x, k)[:, :, :, None] * pair_decay

    if delta:
        T = unit_lower_inverse(jnp.tril(pairs(k), -1) * beta[..., :, None])
        written = (T * beta[..., None, :]).astype(dtype)
        read = (T * -(beta * from_start)[..., None, :]).astype(dtype)
        values = product("cbkrts,bcskrw->cbkrtw", written, v, dtype)
        reads = product("cbkrts,bcskh->cbkrth", read, k, dtype)
    else:
        values = (jnp.einsum("bctkrw->cbkrtw", v) * beta[..., None]).astype(dtype)
        reads = None
    k_cbkth, q_cbkth = (jnp.einsum("bctkh->cbkth", x)[:, :, :, None] for x in (k, q))
    return Chunks(
        queries=(q_cbkth * from_start[..., None]).astype(dtype),
        keys=(k_cbkth * to_end[..., None]).astype(dtype),
        values=values,
        reads=reads,
        scores=pairs(q).astype(dtype),
        decay=from_start[..., -1],
    )


def change(chunks: Chunks, width: int) -> tuple[jax.Array, jax.Array]:
    """Return M `[c, b, k, r, h, h]` and B `[c, b, k, r, h, width]`, float32: chunks turn a state S into M S + B.

    Further columns than the values have belong to a state to which nothing is added. Without the delta M is a number
    `[c, b, k, r, 1, 1]`.
    """
    moves = chunks.decay[..., None, None]
    if chunks.reads is not None:
        eye = jnp.eye(chunks.keys.shape[-1]).reshape(1, 1, 1, 1, *[chunks.keys.shape[-1]] * 2)
        moves = moves * eye + product("cbkrth,cbkrtg->cbkrhg", chunks.keys, chunks.reads)
    return moves, _widen(product("cbkrth,cbkrtw->cbkrhw", chunks.keys, chunks.values), width)


def recur(
    moves: jax.Array,
    added: jax.Array,
    state: jax.Array,
    dtype: jax.typing.DTypeLike,
    *,
    back: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Go from chunk to chunk by `S -> M S + B`; return the last S, and each chunk's S before it in `dtype`.

    With `back` go from the last chunk to the first by the transposes of M: so gradients of states do.
    """
    subscripts = "bkrgh,bkrgw->bkrhw" if back else "bkrhg,bkrgw->bkrhw"

    def step(state, chunk):
        move, added = chunk
        moved = move * state if move.shape[-1] == 1 else product(subscripts, move, state)
        return moved + added, state.astype(dtype)

    return jax.lax.scan(step, state, (moves, added), reverse=back, unroll=UNROLL)


def change_back(chunks: Chunks, d_out: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Return the gradients, from outputs, of corrections and of the states before the chunks, float32.

    `d_out` is `[b, c, t, k, r, w]`; the first is `[c, b, k, r, t, w]`, the second `[c, b, k, r, h, width]`.
    """
    d_new = product("cbkrts,bctkrw->cbkrsw", chunks.scores, d_out, d_out.dtype)
    d_states = product("cbkrth,bctkrw->cbkrhw", chunks.queries, d_out)
    if chunks.reads is not None:
        d_states += product("cbkrth,cbkrtw->cbkrhw", chunks.reads, d_new)
    return d_new, _widen(d_states, width)


def advance(state: jax.Array, tokens: Tokens, begins: jax.Array, delta: bool) -> jax.Array:
    """Return the state after these tokens, from the one before them."""
    chunks = prepare(tokens, begins, delta)
    return recur(*change(chunks, state.shape[-1]), state, chunks.values.dtype)[0]


def advance_back(
    d_state: jax.Array, tokens: Tokens, begins: jax.Array, d_out: jax.Array, delta: bool
) -> jax.Array:
    """Return the gradient of the state before these tokens, from `d_state` of that after them."""
    chunks, width = prepare(tokens, begins, delta), d_state.shape[-1]
    moves, _ = change(chunks, width)
    _, added = change_back(chunks, d_out, width)
    return recur(moves, added, d_state, d_out.dtype, back=True)[0]


def outputs(chunks: Chunks, states: jax.Array) -> jax.Array:
    """Return the outputs `[b, c, t, k, r, w]`, of the states before the chunks."""
    read = product("cbkrth,cbkrhw->bctkrw", chunks.queries, states)
    new = corrections(chunks, states)
    return (read + product("cbkrts,cbkrsw->bctkrw", chunks.scores, new)).astype(new.dtype)


def corrections(chunks: Chunks, states: jax.Array) -> jax.Array:
    """Return the corrections `[c, b, k, r, t, w]`, of the states before the chunks in the type of the values."""
    if chunks.reads is None:
        return chunks.values
    read = product("cbkrth,cbkrhw->cbkrtw", chunks.reads, states)
    return (_widen(chunks.values, states.shape[-1]) + read).astype(states.dtype)


def pull_back(d_state, tokens: Tokens, begins: jax.Array, state: jax.Array, d_out, delta: bool):
    """Return the gradients of the state before these tokens and of the tokens.

    `d_state` is the gradient of the state after them, `state` the state before.
    """
    chunks, pull = jax.vjp(lambda tokens: prepare(tokens, begins, delta), tokens)
    width, dtype = state.shape[-1], d_out.dtype
    moves, added = change(chunks, width)
    _, states = recur(moves, added, state, dtype)
    d_new, added = change_back(chunks, d_out, width)
    d_state, d_ends = recur(moves, added, d_state, dtype, back=True)
    d_new = (d_new + product("cbkrth,cbkrhw->cbkrtw", chunks.keys, d_ends)).astype(dtype)
    new = corrections(chunks, states)
    d_chunks = Chunks(
        queries=product("bctkrw,cbkrhw->cbkrth", d_out, states, dtype),
        keys=product("cbkrtw,cbkrhw->cbkrth", new, d_ends, dtype),
        values=d_new,
        reads=product("cbkrtw,cbkrhw->cbkrth", d_new, states, dtype) if delta else None,
        scores=product("bctkrw,cbkrsw->cbkrts", d_out, new, dtype),
        decay=product("cbkrhw,cbkrhw->cbkr", states, d_ends),
    )
    return d_state, pull(d_chunks)[0]


def _widen(x: jax.Array, width: int) -> jax.Array:
    """Append columns of zeros."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def product(subscripts: str, x: jax.Array, y: jax.Array, dtype=jnp.float32) -> jax.Array:
    """Compute `jnp.einsum`, accumulated in float32."""
    return jnp.einsum(subscripts, x, y, preferred_element_type=dtype)


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

    By blocks, as the inverse of a triangle contains the inverses of its two halves: products of powers of A would
    cancel, if keys repeat.
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
    """Invert I + A by the same rule on full matrices, masked to the blocks below the diagonal."""
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
