"""Attention over local arrays: cuDNN on a GPU, the XLA reference elsewhere, our kernel where a call names it.

Every implementation takes the same arguments and none knows a mesh: call it under `smap`, since XLA gathers the inputs
of a custom call that it finds under a plain `jit`.

    attention_xla.py       the definition
    attention_cudnn.py     cuDNN; documents by a mask `[B, T, S]`
    attention_packed.py    cuDNN; documents by their lengths
    attention_mosaic.py    our kernel; documents by a range of the keys for each query (`attention_ranges.py`)
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ultrascale_jax.kernels import attention_cudnn, attention_packed, attention_xla
from ultrascale_jax.kernels.attention_mask import EVERY_KEY, PLAIN_SCORES, BlockMask, Scores
from ultrascale_jax.kernels.choices import AttentionCall
from ultrascale_jax.kernels.device import device, match_vma, on_gpu
from ultrascale_jax.kernels.residuals import name_attention

NO_WINDOW = 2**30
"""A window that no sequence fills."""


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
      q_index: `[T]` int32, the key index of each query; it sees keys `0..q_index`. Only `xla` takes T < S.
      segment_ids: `([B, T], [B, S])` int32; a query sees only keys of its own document.
      window: a query sees the last `window` keys, itself included.
      full: bool scalar: there is no window after all. So one compiled loop runs layers with a window and without one;
        but for `xla`, whose window may be an array, it branches.
      sinks: `[N]` float32, a logit more in the softmax of each head, whose value is zero.
      recompute: keep no scores for the backward pass (only `xla` keeps any).
      implementation: `cudnn` (bf16 or fp16 on a GPU), `cudnn_packed` (the same; documents without a mask, on Hopper
        and later), `mosaic` (bf16 on a Hopper GPU; `segment_ids` must not decrease along a row) or `xla`. `auto` is
        the first in the order of `choices.py` that applies.

    Returns:
      `[B, T, N, H]` in q's type.

    Raises:
      ValueError: the implementation is unknown, or is asked for and cannot compute this.
    """
    mask = BlockMask(segment_ids=segment_ids, causal=True, window=window)
    chosen = choose(implementation, q, k, mask)
    q, k, v, sinks, mask = match_vma(q, k, v, sinks, mask)
    if chosen != "xla":
        return fused_attention(q, k, v, sinks, mask, full, chosen)
    reference = attention_xla.attention_reference
    if recompute:
        reference = jax.checkpoint(reference)
    switched = window is not None and full is not None
    reach = jnp.where(full, NO_WINDOW, window) if switched else window
    out = reference(q, k, v, q_index, mask.segment_ids, reach, sinks)
    return checkpoint_name(out, "attn_core")


def attention_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: BlockMask = EVERY_KEY,
    *,
    scores: Scores = PLAIN_SCORES,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Compute attention to one block of the keys, and its log-sum-exp, by which blocks are joined.

    Args:
      q: queries `[B, T, N, H]`.
      k: keys `[B, S, K, H]`; K divides N (grouped-query attention).
      v: values `[B, S, K, H]`.
      mask: the keys that each query sees.
      scores: how scores follow from q and k.
      implementation: as `attention` takes it.

    Returns:
      The result `[B, T, N, H]` in q's type, and the log-sum-exp of the scores `[B, N, T]` float32. A query that sees
      none of the keys has a finite result and a log-sum-exp far below any other: joined with a block of visible keys,
      it counts for nothing.
    """
    chosen = choose(implementation, q, k, mask, scores=scores)
    return _module(chosen).forward(q, k, v, mask, scores)


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    mask: BlockMask = EVERY_KEY,
    *,
    scores: Scores = PLAIN_SCORES,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of q, k and v from one block of the keys, in their types.

    Args:
      q, k, v, mask, scores, implementation: as given to `attention_forward`.
      out: result `[B, T, N, H]` of all blocks together.
      lse: log-sum-exp `[B, N, T]` float32 of all blocks together.
      dout: cotangent of `out`, `[B, T, N, H]`.
    """
    chosen = choose(implementation, q, k, mask, scores=scores)
    return _module(chosen).backward(q, k, v, out, lse, dout, mask, scores)


def _module(chosen: str) -> Any:
    """Return the module of an implementation that `choose` returned; our kernel's is imported where one is chosen."""
    if chosen == "mosaic":
        from ultrascale_jax.kernels import attention_mosaic

        return attention_mosaic
    modules = {
        "cudnn": attention_cudnn,
        "cudnn_packed": attention_packed,
        "xla": attention_xla,
    }
    return modules[chosen]


def choose(
    implementation: str,
    q: jax.Array,
    k: jax.Array,
    mask: BlockMask,
    *,
    scores: Scores = PLAIN_SCORES,
) -> str:
    """Return `cudnn`, `cudnn_packed`, `mosaic` or `xla`, as `AttentionCall` decides."""
    packable = mask.is_array and on_gpu()
    call = AttentionCall(
        kind=device().device_kind,
        on_gpu=on_gpu(),
        dtype=str(q.dtype) if q.dtype == k.dtype else "",
        queries=q.shape[1],
        keys=k.shape[1],
        head_dim=q.shape[3],
        causal=mask.causal,
        plain_scale=scores.scale is None,
        softcap=scores.softcap is not None,
        masked=mask.is_array,
        by_positions=mask.positions is not None,
        window=mask.window is not None,
        ragged=packable and attention_cudnn.takes_segments(q, k),
    )
    return call.choose(implementation)


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
    """Return the gradient of the sinks `[N]`, from the results of `add_sinks`."""
    if sinks is None:
        return None
    delta_BNT = jnp.einsum("BTNH,BTNH->BNT", dout, out, preferred_element_type=jnp.float32)
    return -jnp.sum(jnp.exp(sinks[None, :, None] - lse) * delta_BNT, axis=(0, 2))


def branch_by_window[Masked: Any, Result](
    run: Callable[[Masked], Result], masked: Masked, full: jax.Array | None
) -> Result:
    """Run by a description with a static `window`, or the same without one where `full` (a bool scalar) says so.

    The branch is taken at run time; its residuals are not differentiated through, so it stands inside of custom
    gradients, forward and backward.
    """
    if full is None or masked.window is None:
        return run(masked)
    without_window = replace(masked, window=None)
    return jax.lax.cond(full, lambda: run(without_window), lambda: run(masked))


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
    attend_back = functools.partial(
        attention_backward, q, k, v, out, lse, dout, implementation=implementation
    )
    gradients = branch_by_window(attend_back, mask, full)
    return *gradients, sinks_gradient(out, lse, dout, sinks), None, None


fused_attention.defvjp(_fused_forward, _fused_backward)
