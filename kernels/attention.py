"""Causal attention over local arrays: cuDNN on a GPU, the XLA reference elsewhere.

Every implementation takes the same arguments and none knows a mesh: call it under `smap`, since XLA gathers the inputs
of a custom call that it finds under a plain `jit`.
"""

import functools
import math

import jax
import jax.numpy as jnp


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_index: jax.Array,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    window: int | None = None,
    recompute: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """Softmax(q k^T / sqrt(H)) v over the keys that each query may see.

    Args:
      q: queries `[B, T, N, H]`.
      k: keys `[B, S, K, H]`; K divides N (grouped-query attention).
      v: values `[B, S, K, H]`.
      q_index: `[T]` int32, the key index at which each query stands; it sees keys `0..q_index`. cuDNN needs T == S.
      segment_ids: `([B, T], [B, S])` int32; a query sees only keys of its own document.
      window: a query sees the last `window` keys, itself included.
      recompute: keep no scores for the backward pass (cuDNN never keeps them).
      implementation: `auto`, `cudnn` (bf16 or fp16 on a GPU) or `xla`; a forced one fails loudly.

    Returns:
      `[B, T, N, H]` in q's type.
    """
    if implementation == "auto":
        implementation = "cudnn" if cudnn_applies(q, k) else "xla"
    if implementation == "cudnn":
        if not cudnn_applies(q, k):
            raise ValueError(
                "model.attention='cudnn': needs a GPU, T == S, bf16 or fp16 and a head dim that is a multiple of 8 up "
                f"to 256; got T={q.shape[1]}, S={k.shape[1]}, {q.dtype}, H={q.shape[3]}; use model.attention='xla'"
            )
        return _cudnn(q, k, v, segment_ids, window)
    reference = _recomputed if recompute else attention_reference
    return reference(q, k, v, q_index, segment_ids, window)


def cudnn_applies(q: jax.Array, k: jax.Array) -> bool:
    """Whether cuDNN's flash attention takes these shapes and types, on the platform that is compiled for."""
    head_dim = q.shape[3]
    fits = (
        q.dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and q.shape[1] == k.shape[1]
    )
    return fits and _platform() in ("gpu", "cuda")


def _platform() -> str:
    """`gpu`, `cuda` or `cpu`: of the mesh's devices, which may be absent (deviceless compilation), or the backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _cudnn(q, k, v, segment_ids, window):
    mask = (
        None
        if segment_ids is None
        else segment_ids[0][:, None, :, None] == segment_ids[1][:, None, None, :]
    )
    local = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=True, local_window_size=local, implementation="cudnn"
    )


def attention_reference(q, k, v, q_index, segment_ids=None, window=None) -> jax.Array:
    """The definition: arguments and result as `attention`; scores and softmax in float32."""
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    # Q is the G * T queries of a kv head. Heads come first, so only these arrays are transposed and never the scores.
    q_BKQH = jnp.moveaxis(q.reshape(B, T, K, N // K, H), 1, 3).reshape(B, K, N // K * T, H)
    k_BKSH, v_BKSH = jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)
    scores = jnp.einsum("BKQH,BKSH->BKQS", q_BKQH, k_BKSH, preferred_element_type=jnp.float32)
    scores = scores.reshape(B, K, N // K, T, S) / math.sqrt(H)
    distance_TS = q_index[:, None] - jnp.arange(S, dtype=jnp.int32)[None, :]
    visible = distance_TS >= 0
    if window is not None:
        visible &= distance_TS < window
    visible = visible[None]
    if segment_ids is not None:
        visible = visible & (segment_ids[0][:, :, None] == segment_ids[1][:, None, :])
    probabilities = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    probabilities = probabilities.astype(v.dtype).reshape(B, K, N // K * T, S)
    out_BKQH = jnp.einsum("BKQS,BKSH->BKQH", probabilities, v_BKSH)
    return jnp.moveaxis(out_BKQH.reshape(B, K, N // K, T, H), 3, 1).reshape(B, T, N, H)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _recomputed(q, k, v, q_index, segment_ids, window):
    """The reference, whose backward pass starts from q, k and v alone."""
    return attention_reference(q, k, v, q_index, segment_ids, window)


def _recomputed_forward(q, k, v, q_index, segment_ids, window):
    inputs = (q, k, v, q_index, segment_ids)
    return attention_reference(*inputs, window), inputs


def _recomputed_backward(window, inputs, g):
    q, k, v, q_index, segment_ids = inputs
    _, pull_back = jax.vjp(
        lambda q, k, v: attention_reference(q, k, v, q_index, segment_ids, window), q, k, v
    )
    return *pull_back(g), None, None


_recomputed.defvjp(_recomputed_forward, _recomputed_backward)
