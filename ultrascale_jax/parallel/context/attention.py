"""Compute exact attention over a sequence that a mesh axis splits (context parallelism).

Every function here is called where `axis` is manual (inside `jax.shard_map` or `smap`), on this rank's shard of the
sequence, in the strategy's order (`sharding/sequence_order.py`), and returns this rank's shard of the result:

    ring       keys and values are sent from rank to rank, each attending to the block that it has while the next one is
               on its way (arXiv 2310.01889); sequence in natural order, so late ranks work while early ones wait
    zigzag     the same, but rank i of r holds chunks i and 2r-1-i, so that all ranks have the same work. After the
               rank's own block each step is two half-blocks without a mask: the second chunk's queries with
               the first chunk's keys, and the first or the second chunk's with its like
    allgather  zigzag's order and blocks; keys and values are gathered once instead (Llama 3, arXiv 2407.21783)
    ulysses    all-to-all: each rank gets the full sequence for a part of the heads (arXiv 2309.14509)

With `ulysses=u` groups of u neighbouring ranks exchange heads for sequence and then act as one position of a ring of
n/u (arXiv 2405.07719). Blocks are joined by their log-sum-exp in float32; the backward pass is a ring of its own that
sends keys, values and the float32 sums of their gradients round once. Attention that is not causal has the same work
for every block: it takes any order, and a ring of full blocks under every name.
"""

import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ultrascale_jax.config import ContextConfig, Strategy, require, require_choice, require_type
from ultrascale_jax.config.kernels import AttentionImplementation
from ultrascale_jax.kernels.attention_mask import Scores
from ultrascale_jax.parallel.context.document_ring import document_ring
from ultrascale_jax.parallel.context.ring import RingSpec, ring
from ultrascale_jax.sharding.manual import manual_axis_size
from ultrascale_jax.sharding.rules import vary, varying


def context_attention(
    context: ContextConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    full: jax.Array | None = None,
    sinks: jax.Array | None = None,
    implementation: AttentionImplementation = "auto",
    with_lse: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute attention by the strategy of `context`; `axis` (of size n) is manual.

    A causal `zigzag` or `allgather` takes `x[:, sequence_order(...)]`: natural order gives wrong results in silence.

    Args:
      context: the strategy, and how many ranks share a position of its ring.
      q, k, v: this rank's queries `[B, T, N, H]`, keys `[B, S, K, H]` and values `[B, S, K, W]`, in the strategy's
        order. K divides N (grouped-query attention); S is T unless attention is not causal and without documents.
      axis: mesh axis that the sequence is split over.
      causal: a query sees no later keys; without it `positions` and `window` are refused.
      scale, softcap: scores are `softcap * tanh(q k^T scale / softcap)`; by default q k^T / sqrt(H).
      window: a query sees the last `window` keys by position, itself included.
      positions: `[B, T]` int32, for a causal mask by other numbers than the places in the sequence, as of packed
        documents: they increase along each document. The tokens still are in the strategy's order.
      segment_ids: `[B, T]` int32, the document of each token; a query sees only its own, a run of equal ids.
      full: bool scalar, the same on all ranks: there is no window after all.
      sinks: `[N]` float32, the same on all ranks: a logit more in the softmax of each head, whose value is zero.
      implementation: of a block, as `kernels.attention` takes it; a forced one fails loudly.
      with_lse: return the log-sum-exp too.

    Returns:
      The result `[B, T, N, W]` in q's type, and the log-sum-exp `[B, N, T]` float32, without a gradient, or None.

    Raises:
      ValueError: shapes, types or settings do not fit each other or the axis.
    """
    require_choice("implementation", implementation, AttentionImplementation)
    _check_numbers(causal, scale, window, softcap)
    ranks, ulysses = _ranks(context, axis)
    _check_shapes(q, k, v, ulysses)
    _check_documents(q, k, positions, segment_ids, window, causal)
    has_documents, width = (positions, segment_ids) != (None, None), v.shape[3]
    (q, k, v), scale = _same_width(q, k, v, scale)
    chunks = context.chunks if ranks > 1 and causal else 1
    spec = RingSpec(
        axis=axis, ranks=ranks, ulysses=ulysses, chunks=chunks, window=window, causal=causal,
        local_mask=has_documents or (window is not None and chunks > 1), placed=positions is None,
        gathered=context.strategy == "allgather", implementation=implementation,
        scores=Scores(scale=scale, softcap=softcap),
    )  # fmt: skip
    out, lse = _over_ranks(spec, q, k, v, (positions, segment_ids), full, sinks, with_lse)
    return out[..., :width], jax.lax.stop_gradient(lse) if with_lse else None


def _strategy(strategy: Strategy) -> Callable[..., jax.Array]:
    """Return the function of one strategy."""

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, *, axis: str, ulysses: int = 1, **settings: Any
    ) -> jax.Array:
        context = ContextConfig(strategy=strategy, ulysses=ulysses)
        return context_attention(context, q, k, v, axis=axis, **settings)[0]

    attend.__name__ = attend.__qualname__ = f"{strategy}_attention"
    attend.__doc__ = f"""Compute attention by the strategy {strategy}, and return `[B, T, N, W]` in q's type.

`ulysses` ranks share a position of the ring, and exchange heads for sequence; `settings` are the other arguments of
`context_attention`:

{inspect.getdoc(context_attention)}"""
    return attend


ring_attention = _strategy("ring")
zigzag_attention = _strategy("zigzag")
allgather_attention = _strategy("allgather")
ulysses_attention = _strategy("ulysses")


def _same_width(q, k, v, scale: float | None) -> tuple[tuple, float | None]:
    """Return q, k and v padded to one width of heads, and the scale of the unpadded; zeros add nothing to scores."""
    H, W = q.shape[3], v.shape[3]
    if H == W:
        return (q, k, v), scale
    pads = [[(0, 0)] * 3 + [(0, max(H, W) - x.shape[3])] for x in (q, k, v)]
    padded = tuple(jnp.pad(x, pad) for x, pad in zip((q, k, v), pads, strict=True))
    return padded, 1 / math.sqrt(H) if scale is None and W > H else scale


def _ranks(context: ContextConfig, axis: str) -> tuple[int, int]:
    """Return the positions of the ring and the ranks that share one; refuse numbers that cannot be."""
    require_type("context", context, ContextConfig, 'as ContextConfig(strategy="zigzag")')
    size = manual_axis_size(axis, "the sequence")
    all_share = context.strategy != "ulysses" or context.ulysses in (1, size)
    fix = f"ulysses_attention shares heads among all ranks of {axis!r}; leave it out"
    require(all_share, "ulysses", context.ulysses, fix)
    return context.ranks(size)


def _over_ranks(
    spec: RingSpec, q, k, v, documents, full, sinks, with_lse: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Attend by `_attend`, between two exchanges of heads for sequence where ranks share a position."""
    axes = frozenset({spec.axis}).union(*map(varying, jax.tree.leaves((q, k, v, documents))))
    q, k, v, sinks = jax.tree.map(lambda x: vary(x, axes), (q, k, v, sinks))
    documents = jax.tree.map(lambda x: vary(x, {spec.axis}), documents)
    if spec.ulysses == 1:
        return _attend(spec, q, k, v, documents, full, sinks)
    q, k, v, sinks = _exchange_heads(spec, q, k, v, sinks)
    documents = jax.tree.map(spec.gather, documents)
    out, lse = _attend(spec, q, k, v, documents, full, sinks)
    out = spec.exchange(out, split_axis=1, concat_axis=2)
    return out, spec.exchange(lse, split_axis=2, concat_axis=1) if with_lse else None


def _exchange_heads(spec: RingSpec, q, k, v, sinks):
    """Return all of a position's sequence for this rank's part of the heads."""
    heads, copies = q.shape[2] // spec.ulysses, max(1, spec.ulysses // k.shape[2])
    if sinks is not None:
        first = jax.lax.axis_index(spec.axis) % spec.ulysses * heads
        sinks = jax.lax.dynamic_slice_in_dim(sinks, first, heads)
    k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
    return *(spec.exchange(x, split_axis=2, concat_axis=1) for x in (q, k, v)), sinks


def _attend(spec: RingSpec, q, k, v, documents, full, sinks) -> tuple[jax.Array, jax.Array]:
    """Attend by blocks of the ring; where one needs a mask, positions are those given or the places in the sequence."""
    positions, segment_ids = documents
    if spec.causal and spec.placed and segment_ids is not None and spec.window is None:
        return document_ring(spec, q, k, v, segment_ids, sinks)
    T, has_documents = q.shape[1], segment_ids is not None or positions is not None
    masked = has_documents or (spec.ranks > 1 and spec.window is not None) or T % spec.chunks > 0
    if masked and spec.causal and positions is None:
        positions = vary(spec.index(T), {spec.axis})
    return ring(spec, q, k, v, positions if masked else None, segment_ids, full, sinks)


def _check_numbers(
    causal: bool, scale: float | None, window: int | None, softcap: float | None
) -> None:
    """Refuse a setting that is not of its kind, or a number that has no meaning."""
    kinds = (
        ("scale", scale, numbers.Real, "a number"),
        ("softcap", softcap, numbers.Real, "a number"),
        ("window", window, numbers.Integral, "an integer"),
    )
    for name, value, kind, words in kinds:
        fits = value is None or (isinstance(value, kind) and not isinstance(value, bool))
        require(fits, name, value, f"must be {words}, or none")
    require(isinstance(causal, bool), "causal", causal, "must be True or False")
    fix = "a query sees itself at least; use 1 or more, or none"
    require(window is None or window >= 1, "window", window, fix)
    sound = scale is None or (math.isfinite(scale) and scale != 0)
    require(sound, "scale", scale, "must be finite and not 0; none is 1 / sqrt(H)")
    fix = "must be positive; leave it out for scores without a bound"
    require(softcap is None or softcap > 0, "softcap", softcap, fix)


def _check_shapes(q, k, v, ulysses: int) -> None:
    """Raise an error for arrays that do not fit each other or the ranks that exchange heads."""
    shapes, want = (
        f"q {q.shape}, k {k.shape}, v {v.shape}",
        "[B, T, N, H], [B, S, K, H] and [B, S, K, W]",
    )
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"{shapes}: want four dims, {want}")
    types = {x.dtype for x in (q, k, v)}
    if len(types) > 1 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}: want one type of floats")
    if q.dtype == jnp.float64:
        raise ValueError("q, k and v float64: attention computes in float32; cast them to float32")
    (B, _, N, H), (_, S, K, _) = q.shape, k.shape
    if k.shape != (B, S, K, H) or v.shape[:3] != (B, S, K) or N % K:
        raise ValueError(f"{shapes}: want {want}, K a divisor of N")
    fix = (
        f"{N} query heads must be a multiple of it, and {K} key heads a multiple or a divisor; "
        "repeat key heads until they divide, or take ring_attention with fewer ulysses"
    )
    divides = N % ulysses == 0 and (K % ulysses == 0 or ulysses % K == 0)
    require(divides, "ulysses", ulysses, fix)


def _check_documents(q, k, positions, segment_ids, window: int | None, causal: bool) -> None:
    """Raise an error for lengths, positions, documents or a window that do not fit the kind of attention."""
    lengths = q.shape[:2]
    for name, x in (("positions", positions), ("segment_ids", segment_ids)):
        if x is not None and (x.shape != lengths or not jnp.issubdtype(x.dtype, jnp.integer)):
            raise ValueError(
                f"{name} {x.dtype}{list(x.shape)}: want integers [B, T] = {list(lengths)}, this rank's shard"
            )
    if q.shape[1] != k.shape[1] and (causal or segment_ids is not None):
        raise ValueError(
            f"q {q.shape}, k {k.shape}: want as many keys as queries, unless causal=False and without segment_ids"
        )
    for name, value in (("positions", positions), ("window", window)):
        if value is not None and not causal:
            raise ValueError(
                f"{name}: has a meaning for causal attention only; leave it out, or use segment_ids"
            )
