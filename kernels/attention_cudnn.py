"""Call cuDNN's flash attention with its float32 log-sum-exp, and its backward pass from a given one.

`jax.nn.dot_product_attention` returns the log-sum-exp in bfloat16 and hides the backward pass, so ring attention needs
the primitives below it. They are private to JAX: this file is the only one that knows them, and what differs between
the versions that `pyproject.toml` allows.

No GPU of ours has run these calls: tests compile them for H100s, and execute such programs with a model of cuDNN.
"""

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as private

from ultrascale_jax.kernels.attention_mask import (
    PLAIN_SCORES,
    UNSEEN,
    BlockMask,
    Scores,
    first_places,
)
from ultrascale_jax.kernels.device import match_vma

MASKED = -1e9
"""Added to masked scores: finite, so that a query without any key has a log-sum-exp."""


def forward(q, k, v, mask: BlockMask, scores: Scores) -> tuple[jax.Array, jax.Array]:
    """Compute `attention_forward`."""
    q, k, v, mask = match_vma(q, k, v, mask)
    optional, params = _masked(q, mask, scores)
    out, lse = private._dot_product_attention_fwd_p_wrapper.bind(
        q, k, v, *optional, **params, is_training=True
    )
    if mask.lengths is None:
        return out, lse
    lse = jnp.where(first_places(lse.shape[2], mask.lengths[0])[:, None], lse, UNSEEN)
    return _keep_first(out, mask.lengths[0]), lse


def backward(
    q, k, v, out, lse, dout, mask: BlockMask, scores: Scores
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute `attention_backward`."""
    q, k, v, out, lse, dout, mask = match_vma(q, k, v, out, lse, dout, mask)
    optional, params = _masked(q, mask, scores)
    dq, dk, dv = tuple(
        private._dot_product_attention_bwd_p_wrapper.bind(
            q, k, v, *optional, lse, out, dout, **params
        )
    )[:3]
    if mask.lengths is None:
        return dq, dk, dv
    queries, keys = mask.lengths
    return _keep_first(dq, queries), _keep_first(dk, keys), _keep_first(dv, keys)


def packed_forward(q, k, v, lengths, starts) -> tuple[jax.Array, jax.Array]:
    """Return causal attention within segments, and its log-sum-exp; tokens of no segment are not written.

    Args:
      q: queries `[R, L, N, H]`, read as R L tokens in a row.
      k: keys `[R, L, K, H]`.
      v: values `[R, L, K, H]`.
      lengths: `[R, M]` int32, tokens of each segment, at most L; 0 for none, and those come last.
      starts: `[R, M + 1]` int32, first token of each segment in the R L tokens; R L after the last segment.

    Returns:
      `[R, L, N, H]` in q's type, and `[R M, N, L]` float32, by segment.
    """
    optional, params = _packed(q, k, lengths, starts)
    return private._dot_product_attention_fwd_p.bind(q, k, v, *optional, **params, is_training=True)


def packed_backward(q, k, v, out, lse, dout, lengths, starts):
    """Return gradients of q, k and v in their types; tokens of no segment are not written."""
    optional, params = _packed(q, k, lengths, starts)
    return tuple(
        private._dot_product_attention_bwd_p.bind(q, k, v, *optional, lse, out, dout, **params)
    )[:3]


def takes_segments(q, k) -> bool:
    """Return whether cuDNN takes segments of these arrays on the GPU of the compilation.

    Its offsets count elements in int32, and cuDNN 9.6 is the first that groups heads in ragged arrays.
    """
    fits = max(q.size, k.size) < 2**31
    return (
        fits and private.check_compute_capability("9.0") and private.check_cudnn_version() >= 90600
    )


def _masked(q, mask: BlockMask, scores: Scores) -> tuple[list[jax.Array], dict]:
    """Return the optional arrays and the parameters of a call with a mask."""
    optional = _optional(q, mask.by_arrays())
    kind = private.MaskType.CAUSAL if mask.causal else private.MaskType.NO_MASK
    if mask.lengths is not None:
        optional[1:3], kind = mask.lengths, private.MaskType.PADDING
    return optional, _params(q, optional, kind, mask.causal_window, scores)


def _packed(q, k, lengths, starts) -> tuple[list[jax.Array], dict]:
    """Return the optional arrays and the parameters of a call on segments."""
    # The primitive under JAX's wrapper: that moves offsets to the left and makes them count elements.
    unused = _optional(q, None)
    per_token = (x.shape[2] * x.shape[3] for x in (q, k))
    offsets = [starts * count for count in per_token]
    optional = [unused[0], lengths, lengths, *offsets, *unused[5:]]
    params = _params(q, optional, private.MaskType.PADDING_CAUSAL, None)
    if params.pop("score_mod", ...) is None:
        params |= {"score_mod_name": None, "score_mod_jaxpr": None}
    return optional, params


def _keep_first(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return `[B, T, ...]` with zeros from these lengths on: cuDNN does not say what it writes there."""
    return jnp.where(first_places(x.shape[1], lengths)[:, :, None, None], x, 0)


def _optional(q, visible) -> list[jax.Array]:
    """Return bias, lengths and offsets of packed sequences, and page tables: empty if unused."""
    # Not constants: those JAX carries round a loop over layers, and XLA of JAX 0.11 crashes where they are not used.
    bias = q[0, 0, 0, :1]
    unused = bias.astype(jnp.int32)
    if visible is not None:
        masked = max(MASKED, float(jnp.finfo(q.dtype).min))  # float16's own is -65504
        bias = jnp.where(visible, 0.0, masked).astype(q.dtype)[:, None]
    return [bias] + [unused] * 6


def _params(q, optional, mask, window, scores: Scores = PLAIN_SCORES) -> dict:
    newer = {"score_mod": None} if jax.__version_info__ >= (0, 12) else {}
    return {
        "scale": q.shape[3] ** -0.5 if scores.scale is None else scores.scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (optional[0].ndim > 1, False),
        "mask_type": mask,
        "layout": private.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
        **newer,
    }
