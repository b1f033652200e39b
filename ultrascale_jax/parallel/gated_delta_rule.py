"""Compute the gated delta rule of linear attention (Gated DeltaNet, arXiv 2412.06464; Qwen3-Next) on any mesh.

Each value head has a state S `[H, W]`, which a token decays, corrects and reads:

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T        o_t = S_t^T q_t

or, without the delta, S_t = exp(g_t) S_{t-1} + beta_t k_t v_t^T: the state space of Mamba-2 (arXiv 2405.21060).

Both passes go over blocks of `BLOCK` tokens, and in each from chunk to chunk (`delta_chunks.py`). The forward pass
keeps the states at the beginnings of blocks; the backward pass computes everything else again, block by block.

Over cp a rank has one piece of the sequence, or an early and a late one. It turns the state before it into M S + B, and
so do all states and outputs in it. So a rank computes them for S = 0, and the matrices as further columns of the state,
which begin as the identity. Ranks gather M and B of all pieces; each applies those before its own, and then completes
its states and outputs. Gradients of states cross the pieces in the opposite direction, by the transposes of M. Without
the delta M is a number, one further column; ranks compute M and B first, and states and outputs once.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from ultrascale_jax.config import ContextConfig, require
from ultrascale_jax.kernels.device import match_vma
from ultrascale_jax.kernels.residuals import name_attention
from ultrascale_jax.parallel import delta_chunks
from ultrascale_jax.parallel.delta_chunks import Tokens
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.rules import act, mesh_size
from ultrascale_jax.sharding.sequence_order import stretches

CHUNK = 128
"""Tokens that are computed at once; chunks of 64 take 1.3 times as long (simulated, H100, heads of 128)."""

BLOCK = 1024
"""Tokens of a row, at most, whose chunks are in memory at once; loops over shorter blocks wait for kernel launches."""

DIMS = ("BTKH", "BTKH", "BTNW", "BTN", "BTN")
"""Dims of queries, keys, values, logarithms of decays and betas."""


def gated_delta_rule(
    query_BTKH: jax.Array,
    key_BTKH: jax.Array,
    value_BTNW: jax.Array,
    log_decay_BTN: jax.Array,
    beta_BTN: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    *,
    context: ContextConfig | None = None,
    chunk: int = CHUNK,
    delta: bool = True,
) -> jax.Array:
    """Return the outputs `[B, T, N, W]` of all tokens, in the type of the values.

    Products are computed in that type and accumulated in float32; states, decays and inverses are float32.

    Args:
      query_BTKH: queries, normalised and scaled. N is a multiple of K, and head k serves N / K consecutive value heads.
      key_BTKH: keys, normalised.
      value_BTNW: values.
      log_decay_BTN: logarithm of the decay that a token begins with, at most 0.
      beta_BTN: share of the correction that a token writes.
      segment_ids_BT: document of each token, or None for one a row; a state begins at zero where it changes.
      context: how cp splits the sequence; needed where it does.
      chunk: tokens that are computed at once, a power of 2.
      delta: whether a token corrects what the state has for its key; otherwise it adds to it.

    Raises:
      UserError: arrays do not fit each other, or an argument cannot be.
    """
    arrays = query_BTKH, key_BTKH, value_BTNW, log_decay_BTN, beta_BTN
    _check_arrays(*arrays)

    def core(arrays, ids):
        layout = Layout.of(arrays[2].shape[1], chunk, mesh_size("cp"), context)
        begins, joins = _borders(layout, ids, arrays[2].shape[:2])
        *arrays, begins = match_vma(*arrays, begins)
        return _rule(layout, delta, arrays, begins, joins)

    run = smap(core, in_specs=([*map(act, DIMS)], act("BT")), out_specs=act("BTNW"))
    return run([*arrays], segment_ids_BT)


def gated_delta_step(
    state_BNHW: jax.Array,
    query_BTKH: jax.Array,
    key_BTKH: jax.Array,
    value_BTNW: jax.Array,
    log_decay_BTN: jax.Array,
    beta_BTN: jax.Array,
    delta: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Continue states `[B, N, H, W]` float32 by T tokens; return the states after them, and the outputs `[B, T, N, W]`.

    It is for generation, on this device's heads and every token, in natural order: inside of a manual region or without
    a mesh. A token whose logarithm of decay and beta are 0 leaves the state as it is.
    """
    arrays = query_BTKH, key_BTKH, value_BTNW, log_decay_BTN, beta_BTN
    _check_arrays(*arrays)
    B, T, N, W = value_BTNW.shape
    layout = Layout.of(T, CHUNK)
    state, arrays, begins = match_vma(state_BNHW, [*arrays], jnp.zeros((B, T), bool))
    grouped = state.reshape(B, key_BTKH.shape[2], -1, *state.shape[2:])
    end, (_, out) = _forward(layout.tokens(arrays), layout.split(begins), grouped, delta)
    return end.reshape(state.shape), layout.join(out).reshape(B, T, N, W)


def _check_arrays(q, k, v, log_decay, beta) -> None:
    """Refuse arrays that do not fit each other."""
    shapes = ", ".join(str(x.shape) for x in (q, k, v, log_decay, beta))
    sound = (q.ndim, v.ndim) == (4, 4) and q.shape == k.shape and v.shape[:2] == k.shape[:2]
    sound = sound and log_decay.shape == beta.shape == v.shape[:3] and v.shape[2] % k.shape[2] == 0
    fix = "must be [B, T, K, H] twice, [B, T, N, W] and [B, T, N] twice, N a multiple of K"
    require(sound, "arrays", shapes, fix)
    types = f"{q.dtype}, {k.dtype}, {v.dtype}"
    sound = q.dtype == k.dtype == v.dtype and v.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
    require(sound, "arrays", types, "queries, keys and values must be of one type, at most float32")


@dataclass(frozen=True)
class Layout:
    """The static description of a rank's tokens: pieces of the sequence, divided into blocks of chunks."""

    length: int
    """Tokens of the rank (T)."""
    chunk: int
    order: tuple[tuple[int, ...], ...]
    """For each rank of cp, the places in the sequence of its pieces: one, or two for an early and a late half."""

    @classmethod
    def of(
        cls, length: int, chunk: int, cp: int = 1, context: ContextConfig | None = None
    ) -> "Layout":
        """Describe the `length` tokens of each of `cp` ranks. Raises `UserError` for arguments that cannot be."""
        fix = f"cp={cp} splits the sequence; give the run's cfg.cp, which says in what order"
        require(context is not None or cp == 1, "context", context, fix)
        require(chunk > 0 and chunk & (chunk - 1) == 0, "chunk", chunk, "must be a power of 2")
        places = np.zeros((1, 1), int) if context is None else stretches(length, cp, context)[1]
        longest = -(-length // places.shape[1])
        chunk = min(chunk, 1 << (longest - 1).bit_length())
        return cls(length, chunk, tuple(map(tuple, places.tolist())))

    @property
    def pieces(self) -> int:
        """Return the pieces of a rank."""
        return len(self.order[0])

    @property
    def is_split(self) -> bool:
        """Return whether there is more than one piece."""
        return len(self.order) * self.pieces > 1

    def cut(self, x: jax.Array) -> list[jax.Array]:
        """Return the pieces of `x` `[B, T, ...]`; an early half may have one token more."""
        first = -(-self.length // self.pieces)
        return [x[:, i * first : (i + 1) * first] for i in range(self.pieces)]

    def split(self, x: jax.Array) -> jax.Array:
        """Return `[blocks, pieces * B, chunks, C, ...]` of `x` `[B, T, ...]`; zeros pad it, tokens without effect."""
        pieces = self.cut(x)
        chunks = -(-pieces[0].shape[1] // self.chunk)
        blocks = -(-chunks * self.chunk // BLOCK)
        chunks = -(-chunks // blocks)
        size = blocks * chunks * self.chunk
        padded = [
            jnp.pad(p, [(0, 0), (0, size - p.shape[1]), *[(0, 0)] * (p.ndim - 2)]) for p in pieces
        ]
        rows = jnp.concatenate(padded).reshape(-1, blocks, chunks, self.chunk, *x.shape[2:])
        return jnp.moveaxis(rows, 1, 0)

    def join(self, y: jax.Array) -> jax.Array:
        """Invert `split`."""
        rows = jnp.moveaxis(y, 0, 1)
        size = np.prod(rows.shape[1:4])
        pieces = rows.reshape(self.pieces, -1, size, *rows.shape[4:])
        first = -(-self.length // self.pieces)
        lengths = (first, self.length - first)
        parts = [piece[:, :length] for piece, length in zip(pieces, lengths, strict=False)]
        return jnp.concatenate(parts, axis=1)

    def tokens(self, arrays: list[jax.Array]) -> Tokens:
        """Return the five arrays of a rank, split, with value heads grouped by the key head that serves them."""
        B, T, K, _ = arrays[1].shape
        grouped = [x.reshape(B, T, K, -1, *x.shape[3:]) for x in arrays[2:]]
        return Tokens(*map(self.split, (*arrays[:2], *grouped)))

    def gather(self, x: jax.Array) -> jax.Array:
        """All-gather `x` `[pieces, ...]`: return `[ranks * pieces, ...]`, in the order of ranks."""
        return jax.lax.all_gather(x, "cp", tiled=True) if len(self.order) > 1 else x

    def in_sequence(self) -> np.ndarray:
        """Return the places in the result of `gather` of the pieces, in the order of the sequence."""
        return np.argsort(np.ravel(self.order))

    def places(self) -> jax.Array:
        """Return the places in the sequence of this rank's pieces."""
        rank = jax.lax.axis_index("cp") if len(self.order) > 1 else 0
        return jnp.array(self.order)[rank]


def _borders(layout: Layout, ids: jax.Array | None, shape: tuple[int, ...]):
    """Return where a document begins inside a piece, bool `[B, T]`, and which pieces continue the document before.

    The second is bool `[ranks * pieces, B]`, in the order of the sequence, or None if all do.
    """
    if ids is None:
        return jnp.zeros(shape, bool), None
    pieces = layout.cut(ids)
    begins = [jnp.pad(x[:, 1:] != x[:, :-1], ((0, 0), (1, 0))) for x in pieces]
    begins = jnp.concatenate(begins, axis=1)
    if not layout.is_split:
        return begins, None
    ends = jnp.stack([x[:, jnp.array([0, -1])] for x in pieces])
    ends = layout.gather(ends)[layout.in_sequence()]
    return begins, jnp.pad(ends[1:, :, 0] == ends[:-1, :, 1], ((1, 0), (0, 0)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rule(
    layout: Layout,
    delta: bool,
    arrays: list[jax.Array],
    begins: jax.Array,
    joins: jax.Array | None,
):
    """Compute this rank's outputs `[B, T, N, W]`."""
    return _rule_fwd(layout, delta, arrays, begins, joins)[0]


def _rule_fwd(layout: Layout, delta: bool, arrays, begins, joins):
    tokens, split_begins = layout.tokens(arrays), layout.split(begins)
    start = _start(layout, tokens, delta)
    if layout.is_split and not delta:

        def advance(state, inputs):
            return delta_chunks.advance(state, *inputs, delta=delta), None

        end, _ = jax.lax.scan(advance, start, (tokens, split_begins))
        start = _cross(layout, joins, end, delta)
    end, (states, out) = _forward(tokens, split_begins, start, delta)
    if layout.is_split and delta:
        start = _cross(layout, joins, end, delta)
        states = _apply("nbkrhg,bkrgw->nbkrhw", states, start)
        out = _apply("nbctkrg,bkrgw->nbctkrw", out, start)
    out, states = name_attention(layout.join(out).reshape(arrays[2].shape), states)
    return out, (arrays, begins, joins, states)


def _apply(subscripts: str, changes: jax.Array, states: jax.Array) -> jax.Array:
    """Return M S + B in the type of `changes`, whose columns are B's and then M's."""
    W = states.shape[-1]
    product = delta_chunks.product(subscripts, changes[..., W:], states.astype(changes.dtype))
    return (product + changes[..., :W]).astype(changes.dtype)


def _forward(tokens: Tokens, begins: jax.Array, state: jax.Array, delta: bool):
    """Return the state after all blocks, the states before each, and their outputs."""

    def block(state, inputs):
        chunks = delta_chunks.prepare(*inputs, delta=delta)
        moves = delta_chunks.change(chunks, state.shape[-1])
        end, states = delta_chunks.recur(*moves, state, chunks.values.dtype)
        return end, (state, delta_chunks.outputs(chunks, states))

    return jax.lax.scan(block, state, (tokens, begins))


def _rule_bwd(layout: Layout, delta: bool, residuals, d_out):
    arrays, begins, joins, states = residuals
    tokens, begins = layout.tokens(arrays), layout.split(begins)
    d_out = layout.split(d_out.reshape(*d_out.shape[:2], *tokens.value.shape[-3:]))
    d_state = _start(layout, tokens, delta)
    if layout.is_split:

        def advance(d_state, inputs):
            return delta_chunks.advance_back(d_state, *inputs, delta=delta), None

        d_state, _ = jax.lax.scan(advance, d_state, (tokens, begins, d_out), reverse=True)
        d_state = _cross(layout, joins, d_state, delta, back=True)

    def pull_back(d_state, inputs):
        return delta_chunks.pull_back(d_state, *inputs, delta=delta)

    _, d_tokens = jax.lax.scan(pull_back, d_state, (tokens, begins, states, d_out), reverse=True)
    grads = [layout.join(x).reshape(array.shape) for x, array in zip(d_tokens, arrays, strict=True)]
    return grads, None, None


_rule.defvjp(_rule_fwd, _rule_bwd)


def _start(layout: Layout, tokens: Tokens, delta: bool) -> jax.Array:
    """Return states `[pieces * B, k, r, h, w]` of zeros; with cp they have further columns, in which M begins as 1.

    With the delta they are the identity, h columns.
    """
    _, rows, _, _, K, R, W = tokens.value.shape
    H = tokens.key.shape[-1]
    start = jnp.zeros((rows, K, R, H, W), jnp.float32)
    if layout.is_split:
        one = jnp.eye(H) if delta else jnp.ones((H, 1))
        one = jnp.broadcast_to(one, (rows, K, R, *one.shape))
        start = jnp.concatenate([start, one], axis=-1)
    return match_vma(start, tokens.value)[0]


def _cross(
    layout: Layout, joins, changes: jax.Array, delta: bool, *, back: bool = False
) -> jax.Array:
    """Return the states `[pieces * B, k, r, h, w]` before this rank's pieces, or with `back` gradients of those after.

    `changes` `[pieces * B, k, r, h, w + h]` are B and M of each piece, which turns a state S into M S + B; without the
    delta M is one column of equal numbers.
    """
    shape = changes.shape
    changes = layout.gather(changes.reshape(layout.pieces, -1, *shape[1:]))
    W = shape[-1] - (shape[-2] if delta else 1)
    if joins is None:
        joins = jnp.ones(changes.shape[:2], bool)
    if back:
        joins = jnp.pad(joins[1:], ((0, 1), (0, 0)))

    def cross(state, piece):
        place, join = piece
        state = jnp.where(join[:, None, None, None, None], state, 0)
        change = changes[place]
        M = change[..., W:]
        moved = jnp.matmul(M, state, precision=jax.lax.Precision.HIGHEST) if delta else M * state
        return change[..., :W] + moved, state

    start = jnp.zeros_like(changes[0, ..., :W])
    _, states = jax.lax.scan(cross, start, (layout.in_sequence(), joins), reverse=back)
    return states[layout.places()].reshape(*shape[:-1], W)
