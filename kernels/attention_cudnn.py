"""Call cuDNN's flash attention with its float32 log-sum-exp, and its backward pass from a given one.

`jax.nn.dot_product_attention` returns the log-sum-exp in bfloat16 and hides the backward pass, so ring attention needs
the primitives below it. They are private to JAX: this file is the only one that knows them, and what differs between
the versions that `pyproject.toml` allows.
"""

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as private

MASKED = -1e9
"""Added to masked scores: finite, so that a query without any key has a log-sum-exp."""


def forward(q, k, v, visible, causal, window) -> tuple[jax.Array, jax.Array]:
    """Return the result `[B, T, N, H]` in q's type and log-sum-exp `[B, N, T]` float32; see `attention_forward`."""
    optional = _optional(q, visible)
    params = _params(q, optional, causal, window)
    return private._dot_product_attention_fwd_p_wrapper.bind(
        q, k, v, *optional, **params, is_training=True
    )


def backward(q, k, v, out, lse, dout, visible, causal, window):
    """Return gradients of q, k and v in their types, from the whole softmax's `out` and `lse`."""
    optional = _optional(q, visible)
    params = _params(q, optional, causal, window)
    return tuple(
        private._dot_product_attention_bwd_p_wrapper.bind(
            q, k, v, *optional, lse, out, dout, **params
        )
    )[:3]


def _optional(q, visible) -> list[jax.Array]:
    """Return bias, lengths and offsets of packed sequences, and page tables: empty if unused."""
    # Not constants: those JAX carries round a loop over layers, and XLA of JAX 0.11 crashes where they are not used.
    bias = q[0, 0, 0, :1]
    unused = bias.astype(jnp.int32)
    if visible is not None:
        masked = max(MASKED, float(jnp.finfo(q.dtype).min))  # float16's own is -65504
        bias = jnp.where(visible, 0.0, masked).astype(q.dtype)[:, None]
    return [bias] + [unused] * 6


def _params(q, optional, causal, window) -> dict:
    mask = private.MaskType.CAUSAL if causal else private.MaskType.NO_MASK
    newer = {"score_mod": None} if jax.__version_info__ >= (0, 12) else {}
    return {
        "scale": q.shape[3] ** -0.5,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (optional[0].ndim > 1, False),
        "mask_type": mask,
        "layout": private.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
        **newer,
    }
