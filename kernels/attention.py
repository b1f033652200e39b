"""Causal attention over local arrays: cuDNN on a GPU, the XLA reference elsewhere, our kernel where it is asked for.

Every implementation takes the same arguments and none knows a mesh: call it under `smap`, since XLA gathers the inputs
of a custom call that it finds under a plain `jit`. For documents cuDNN takes their lengths (`attention_packed.py`),
where their rows are whole, and else, like the reference, a mask `[B, T, S]`; the kernel (`attention_mosaic.py`) takes a
range of the keys for each query, and skips what is in none.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ultrascale_jax.kernels import attention_cudnn
from ultrascale_jax.kernels import attention_mosaic as mosaic
from ultrascale_jax.kernels.attention_mosaic import Ranges
from ultrascale_jax.kernels.attention_packed import packed_attention
from ultrascale_jax.kernels.device import choose, match_vma, on_gpu, takes
from ultrascale_jax.kernels.document_classes import LEAST_TOKENS, SHORTEST, divides
from ultrascale_jax.kernels.limits import cudnn_takes_head_dim
from ultrascale_jax.kernels.residuals import name_attention

IMPLEMENTATIONS = ("auto", "cudnn", "cudnn_packed", "mosaic", "xla")

FIRST = -(2**31)
"""An index before any."""

NO_WINDOW = 2**30
"""A window that no sequence fills."""

UNSEEN = -1e30
"""Score of a masked key: finite, so that a query without any key has a log-sum-exp."""

STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BlockMask:
    """The keys of a block that each query sees; all of them by default."""

    visible: jax.Array | None = None
    """`[B or 1, T, S]` bool, which keys a query may see, besides what `causal` says; `mosaic` takes none."""
    ranges: Ranges | None = None
    """One range of the keys for each query, instead of `visible`, `causal` and `window`."""
    causal: bool = field(default=False, metadata=STATIC)
    """Query t sees keys up to t; T == S."""
    window: int | None = field(default=None, metadata=STATIC)
    """Number of causal keys, the last ones, that a query sees."""

    @property
    def is_array(self) -> bool:
        """Whether arrays say which keys are seen."""
        return self.visible is not None or self.ranges is not None

    def listed(self, S: int) -> jax.Array | None:
        """Return the keys that the arrays allow, as `visible_keys` does; None for all `S`."""
        return self.visible if self.ranges is None else _within(self.ranges, S)

    def dense(self, T: int, S: int) -> jax.Array | None:
        """Return the whole mask as `visible_keys` does; None for all keys."""
        listed = self.listed(S)
        if not self.causal:
            return listed
        ordered = visible_keys(jnp.arange(T), jnp.arange(S), window=self.window)
        return ordered if listed is None else ordered & listed

    def as_ranges(self, T: int, S: int) -> Ranges:
        """Return the whole mask as one range of keys for each query."""
        if self.visible is not None:
            raise ValueError(
                "implementation='mosaic': takes no `visible`; give `ranges` of visible_ranges"
            )
        if self.ranges is not None:
            return self.ranges
        if self.causal:
            return visible_ranges(jnp.arange(T), jnp.arange(S), window=self.window)
        return Ranges(jnp.zeros((1, T), jnp.int32), jnp.full((1, T), S, jnp.int32))


EVERY_KEY = BlockMask()


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_index: jax.Array,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    window: int | None = None,
    full: jax.Array | None = None,
    sinks: jax.Array | None = None,
    recompute: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """Compute softmax(q k^T / sqrt(H)) v over the keys that each query may see.

    Args:
      q: queries `[B, T, N, H]`.
      k: keys `[B, S, K, H]`; K divides N (grouped-query attention).
      v: values `[B, S, K, H]`.
      q_index: `[T]` int32, the key index of each query; it sees keys `0..q_index`. cuDNN needs T == S.
      segment_ids: `([B, T], [B, S])` int32; a query sees only keys of its own document.
      window: a query sees the last `window` keys, itself included.
      full: bool scalar: there is no window after all. So one compiled loop runs layers with a window and without one;
        for cuDNN, whose window is a constant, it branches.
      sinks: `[N]` float32, a logit more in the softmax of each head, whose value is zero.
      recompute: keep no scores for the backward pass (cuDNN never keeps them).
      implementation: `cudnn` (bf16 or fp16 on a GPU), `cudnn_packed` (the same; documents without a mask, on Hopper
        and later), `mosaic` (bf16 on a Hopper GPU; `segment_ids` must not decrease along a row) or `xla`; a forced one
        fails loudly. `auto` is the first in the order of `choices.py` that applies.

    Returns:
      `[B, T, N, H]` in q's type.
    """
    if sinks is None and segment_ids is not None and packs(implementation, q, k, window):
        return packed_attention(*match_vma(q, k, v, segment_ids[0]))
    chosen = _choose(implementation, q, k, segment_ids is not None)
    if sinks is not None:
        q, sinks = match_vma(q, sinks)
    reach = window if window is None or full is None else jnp.where(full, NO_WINDOW, window)
    if chosen == "mosaic":
        k_index = jnp.arange(k.shape[1], dtype=jnp.int32)
        ranges = visible_ranges(q_index, k_index, segment_ids, reach)
        *arrays, ranges = _match_vma(ranges, q, k, v)
        return fused_attention(*arrays, sinks, BlockMask(ranges=ranges), None, chosen)
    if chosen == "cudnn":
        visible = []
        if segment_ids is not None:
            visible = [segment_ids[0][:, :, None] == segment_ids[1][:, None, :]]
        q, k, v, *visible = match_vma(q, k, v, *visible)
        mask = BlockMask(visible=visible[0] if visible else None, causal=True, window=window)
        return fused_attention(q, k, v, sinks, mask, full, chosen)
    reference = attention_reference
    if recompute:
        reference = jax.checkpoint(reference)
    return checkpoint_name(reference(q, k, v, q_index, segment_ids, reach, sinks), "attn_core")


def attention_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: BlockMask = EVERY_KEY,
    *,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Compute attention to one block of the keys, and its log-sum-exp, by which blocks are joined.

    Args:
      q: queries `[B, T, N, H]`.
      k: keys `[B, S, K, H]`; K divides N (grouped-query attention).
      v: values `[B, S, K, H]`.
      mask: the keys that each query sees.
      implementation: as `attention` takes it.

    Returns:
      The result `[B, T, N, H]` in q's type, and the log-sum-exp of the scores `[B, N, T]` float32. A query that sees
      none of the keys has a finite result and a log-sum-exp far below any other: it counts for nothing beside a block
      with keys that it sees.
    """
    B, T, N = q.shape[:3]
    S = k.shape[1]
    chosen = _choose(implementation, q, k, mask.is_array, mask.causal)
    if chosen == "mosaic":
        ranges = mask.as_ranges(T, S)
        return mosaic.forward(*_match_vma(ranges, q, k, v))
    if chosen == "cudnn":
        return attention_cudnn.forward(q, k, v, mask.listed(S), mask.causal, mask.window)
    scores_BKGTS = _scores(q, k, mask.dense(T, S))
    lse_BKGT = jax.nn.logsumexp(scores_BKGTS, axis=-1)
    probabilities = jnp.exp(scores_BKGTS - lse_BKGT[..., None])
    return _ungroup(_weighted(probabilities, v)).astype(q.dtype), lse_BKGT.reshape(B, N, T)


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    mask: BlockMask = EVERY_KEY,
    *,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of q, k and v from one block of the keys, in their types.

    Args:
      q, k, v, mask, implementation: as given to `attention_forward`.
      out: result `[B, T, N, H]` of all blocks together.
      lse: log-sum-exp `[B, N, T]` float32 of all blocks together.
      dout: cotangent of `out`, `[B, T, N, H]`.
    """
    T, S = q.shape[1], k.shape[1]
    chosen = _choose(implementation, q, k, mask.is_array, mask.causal)
    if chosen == "mosaic":
        ranges = mask.as_ranges(T, S)
        return mosaic.backward(*_match_vma(ranges, q, k, v, out, lse, dout))
    if chosen == "cudnn":
        listed, causal, window = mask.listed(S), mask.causal, mask.window
        return attention_cudnn.backward(q, k, v, out, lse, dout, listed, causal, window)
    K = k.shape[2]
    scores_BKGTS = _scores(q, k, mask.dense(T, S))
    rows = scores_BKGTS.shape[:4]
    probabilities = jnp.exp(scores_BKGTS - lse.reshape(rows)[..., None])
    dout_BKGTH, f32 = _group(dout, K), jnp.float32
    delta_BNT = jnp.einsum("BTNH,BTNH->BNT", dout, out, preferred_element_type=f32)
    dv = jnp.einsum(
        "BKGTS,BKGTH->BSKH", probabilities.astype(v.dtype), dout_BKGTH, preferred_element_type=f32
    )
    dprobabilities = jnp.einsum("BKGTH,BSKH->BKGTS", dout_BKGTH, v, preferred_element_type=f32)
    dscores = probabilities * (dprobabilities - delta_BNT.reshape(rows)[..., None])
    dscores = (dscores / math.sqrt(q.shape[3])).astype(q.dtype)
    dq = jnp.einsum("BKGTS,BSKH->BKGTH", dscores, k, preferred_element_type=f32)
    dk = jnp.einsum("BKGTS,BKGTH->BSKH", dscores, _group(q, K), preferred_element_type=f32)
    return _ungroup(dq).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def visible_keys(
    q_index: jax.Array,
    k_index: jax.Array,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    window: int | jax.Array | None = None,
) -> jax.Array:
    """Return the keys that each query sees, `[B or 1, T, S]` bool: none after it, of its document, in its window.

    `q_index` and `k_index` are `[T]` or `[B, T]`, and `[S]` or `[B, S]`; `segment_ids` and `window` as `attention`'s.
    """
    q_index, k_index = jnp.atleast_2d(q_index), jnp.atleast_2d(k_index)
    distance = q_index[:, :, None] - k_index[:, None, :]
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    if segment_ids is not None:
        seen = seen & (segment_ids[0][:, :, None] == segment_ids[1][:, None, :])
    return seen


def visible_ranges(
    q_index: jax.Array,
    k_index: jax.Array,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    window: int | jax.Array | None = None,
) -> Ranges:
    """Return `visible_keys` as one range of keys a query, `[B or 1, T]` int32; no array is `[T, S]`.

    It is one range where the ids of documents do not decrease, and indices increase along each document.
    """
    q_index, k_index = jnp.atleast_2d(q_index), jnp.atleast_2d(k_index)
    q_ids, k_ids = segment_ids or (jnp.zeros_like(q_index), jnp.zeros_like(k_index))
    B = max(x.shape[0] for x in (q_index, k_index, q_ids, k_ids))
    q_index, k_index, q_ids, k_ids = (
        jnp.broadcast_to(x, (B, x.shape[1])) for x in (q_index, k_index, q_ids, k_ids)
    )
    unseen = jnp.full_like(q_index, FIRST) if window is None else q_index - window
    start, end = (jax.vmap(_count_until)(k_ids, k_index, q_ids, x) for x in (unseen, q_index))
    return Ranges(start, end)


def packs(implementation: str, q: jax.Array, k: jax.Array, window: int | None = None) -> bool:
    """Return whether documents of these queries and keys are packed, and need no mask.

    Raises:
      ValueError: `cudnn_packed` is forced, and cuDNN cannot do it.
    """
    T, S = q.shape[1], k.shape[1]
    fits = T == S and window is None and divides(T)
    fits = fits and cudnn_applies(q, k) and attention_cudnn.packed_applies(q, k)
    if implementation == "cudnn_packed" and not fits:
        raise ValueError(
            "kernels.attention='cudnn_packed': needs cuDNN 9.6 on an H100 or later, bf16 or fp16, no window, fewer "
            f"than 2^31 elements, and rows of {LEAST_TOKENS} tokens or more that 4 divides down to {SHORTEST}; "
            f"got S={S}, window={window}, {q.dtype}{q.shape}; use kernels.attention='auto'"
        )
    return fits and takes("attention", implementation, "cudnn_packed")


def _choose(implementation: str, q, k, masked: bool, causal: bool = True) -> str:
    """Choose `cudnn`, `mosaic` or `xla` by `implementation` and these arrays."""
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation={implementation!r}: must be one of {known}")
    if implementation == "cudnn_packed":
        if masked:
            raise ValueError(
                "kernels.attention='cudnn_packed': packs no documents on a ring or with sinks, which read a mask; "
                "use kernels.attention='auto'"
            )
        implementation = "cudnn"  # there are no documents
    if implementation == "mosaic":
        (T, _, H), S = q.shape[1:], k.shape[1]
        aligned = T % mosaic.TILE == 0 and S % mosaic.TILE == 0 and H in mosaic.HEAD_DIMS
        choose(
            implementation,
            fits=aligned and q.dtype == k.dtype == jnp.bfloat16,
            needs=f"bfloat16, T and S in multiples of {mosaic.TILE}, and a head dim of 64 or 128",
            got=f"{q.dtype} and {k.dtype}, T={T}, S={S}, H={H}",
            field="attention",
        )
    if implementation == "auto":
        listed = takes("attention", implementation, "cudnn")
        return "cudnn" if listed and cudnn_applies(q, k, masked, causal) else "xla"
    if implementation == "cudnn" and not cudnn_applies(q, k, masked, causal):
        raise ValueError(
            "kernels.attention='cudnn': needs a GPU, T == S (even with a mask), bf16 or fp16 and a head dim that is a "
            f"multiple of 8 up to 256; got T={q.shape[1]}, S={k.shape[1]}, {q.dtype}, H={q.shape[3]}; "
            "use kernels.attention='xla'"
        )
    return implementation


def cudnn_applies(q: jax.Array, k: jax.Array, masked: bool = False, causal: bool = True) -> bool:
    """Return whether cuDNN's flash attention accepts these shapes and types on the platform of the compilation."""
    (T, _, head_dim), S = q.shape[1:], k.shape[1]
    fits = (
        q.dtype in (jnp.bfloat16, jnp.float16)
        and cudnn_takes_head_dim(head_dim)
        and (T == S or not causal)
        and not (masked and (T % 2 or S % 2))
    )
    return fits and on_gpu()


def attention_reference(q, k, v, q_index, segment_ids=None, window=None, sinks=None) -> jax.Array:
    """The definition: arguments and result as `attention`; scores and softmax in float32."""
    k_index = jnp.arange(k.shape[1], dtype=jnp.int32)
    scores_BKGTS = _scores(q, k, visible_keys(q_index, k_index, segment_ids, window))
    if sinks is None:
        probabilities = jax.nn.softmax(scores_BKGTS, axis=-1)
    else:
        B, K, G, T, S = scores_BKGTS.shape
        column = jnp.broadcast_to(sinks.reshape(1, K, G, 1, 1), (B, K, G, T, 1))
        scores_BKGTS = jnp.concatenate(match_vma(scores_BKGTS, column), axis=-1)
        probabilities = jax.nn.softmax(scores_BKGTS, axis=-1)[..., :S]
    return _ungroup(_weighted(probabilities, v)).astype(q.dtype)


def add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array | None):
    """Join a result `[B, T, N, H]` and its log-sum-exp `[B, N, T]` with the sinks `[N]`: one block more, of value zero.

    `attention_backward` takes what this returns, whatever computed the blocks. Without sinks both stay.
    """
    if sinks is None:
        return out, lse
    total = jnp.logaddexp(lse, sinks[None, :, None])
    share = jnp.moveaxis(jnp.exp(lse - total), 1, 2)[..., None]
    return (out * share).astype(out.dtype), total


def sinks_gradient(
    out: jax.Array, lse: jax.Array, dout: jax.Array, sinks: jax.Array | None
) -> jax.Array | None:
    """Return the gradient of the sinks `[N]`, from what `add_sinks` returned."""
    if sinks is None:
        return None
    delta_BNT = jnp.einsum("BTNH,BTNH->BNT", dout, out, preferred_element_type=jnp.float32)
    return -jnp.sum(jnp.exp(sinks[None, :, None] - lse) * delta_BNT, axis=(0, 2))


def _count_until(k_ids, k_index, q_ids, q_index) -> jax.Array:
    """Count the keys `[S]` before or at each query `[T]`, by document and then by index, by bisection."""
    S, count = k_index.shape[0], jnp.zeros_like(q_index)
    for bit in reversed(range(S.bit_length())):
        more = count + (1 << bit)
        last = jnp.minimum(more, S) - 1
        ids, index = k_ids[last], k_index[last]
        before = (ids < q_ids) | ((ids == q_ids) & (index <= q_index))
        count = jnp.where((more <= S) & before, more, count)
    return count


def _match_vma(ranges: Ranges, *arrays: jax.Array) -> tuple[Any, ...]:
    """Return the arrays and then the ranges, `[B, T]`, typed as varying over the same mesh axes."""
    bounds = (jnp.broadcast_to(x, arrays[0].shape[:2]) for x in ranges)
    *others, start, end = match_vma(*arrays, *bounds)
    return *others, Ranges(start, end)


def _within(ranges: Ranges, S: int) -> jax.Array:
    """Return the keys in the ranges in the form of `visible_keys`."""
    start, end = (x[:, :, None] for x in ranges)
    k_index = jnp.arange(S, dtype=jnp.int32)[None, None]
    return (k_index >= start) & (k_index < end)


def _scores(q, k, visible):
    """Return scaled scores `[B, K, G, T, S]` float32, a large negative number for masked keys."""
    q_BKGTH = _group(q, k.shape[2])
    B, K, G, T, H = q_BKGTH.shape
    # G and T become one dim, and heads come first, so only these arrays are transposed and never the scores.
    q_BKQH, k_BKSH = q_BKGTH.reshape(B, K, G * T, H), jnp.moveaxis(k, 1, 2)
    scores = jnp.einsum("BKQH,BKSH->BKQS", q_BKQH, k_BKSH, preferred_element_type=jnp.float32)
    scores = scores.reshape(B, K, G, T, k.shape[1]) / math.sqrt(H)
    return scores if visible is None else jnp.where(visible[:, None, None], scores, UNSEEN)


def _weighted(probabilities_BKGTS, v):
    """Return the values' mean `[B, K, G, T, H]` under these probabilities."""
    B, K, G, T, S = probabilities_BKGTS.shape
    probabilities = probabilities_BKGTS.astype(v.dtype).reshape(B, K, G * T, S)
    out = jnp.einsum("BKQS,BKSH->BKQH", probabilities, jnp.moveaxis(v, 1, 2))
    return out.reshape(B, K, G, T, v.shape[3])


def _group(x_BTNH, K: int):
    """Reshape `[B, T, N, H]` to `[B, K, G, T, H]`."""
    B, T, N, H = x_BTNH.shape
    return jnp.moveaxis(x_BTNH.reshape(B, T, K, N // K, H), 1, 3)


def _ungroup(x_BKGTH):
    """Reshape `[B, K, G, T, H]` to `[B, T, N, H]`."""
    B, K, G, T, H = x_BKGTH.shape
    return jnp.moveaxis(x_BKGTH, 3, 1).reshape(B, T, K * G, H)


def branch_by_window[Masked: Any, Result](
    run: Callable[[Masked], Result], masked: Masked, full: jax.Array | None
) -> Result:
    """Run by a description with a static `window`, or the same without one where `full` (a bool scalar) says so.

    The branch is taken at run time; its residuals are not differentiated through, so it stands inside of custom
    gradients, forward and backward.
    """
    if full is None or masked.window is None:
        return run(masked)
    whole = replace(masked, window=None)
    return jax.lax.cond(full, lambda: run(whole), lambda: run(masked))


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def fused_attention(q, k, v, sinks, mask: BlockMask, full, implementation: str) -> jax.Array:
    """Attend as `attention_forward`, and join the sinks `[N]` if there are any; `full`: without the mask's window.

    The backward pass starts from the result and the log-sum-exp, by their names.
    """
    return _fused_forward(q, k, v, sinks, mask, full, implementation)[0]


def _fused_forward(q, k, v, sinks, mask: BlockMask, full, implementation: str):
    attend = functools.partial(attention_forward, q, k, v, implementation=implementation)
    out, lse = add_sinks(*branch_by_window(attend, mask, full), sinks)
    out, lse = name_attention(out, lse)
    return out, (q, k, v, sinks, out, lse, mask, full)


def _fused_backward(implementation: str, residuals, dout):
    q, k, v, sinks, out, lse, mask, full = residuals
    given = q, k, v, out, lse, dout
    attend_back = functools.partial(attention_backward, *given, implementation=implementation)
    gradients = branch_by_window(attend_back, mask, full)
    return *gradients, sinks_gradient(out, lse, dout, sinks), None, None


fused_attention.defvjp(_fused_forward, _fused_backward)
