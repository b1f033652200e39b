"""Causal attention over local arrays: cuDNN on a GPU, the XLA reference elsewhere.

Every implementation takes the same arguments and none knows a mesh: call it under `smap`, since XLA gathers the inputs
of a custom call that it finds under a plain `jit`.
"""

import functools
import math

import jax
import jax.numpy as jnp

from ultrascale_jax.kernels import attention_cudnn

UNSEEN = -1e30
"""The score of a key that may not be seen: finite, so that a query without any has a log-sum-exp."""


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
    if _choose(implementation, q, k, segment_ids is not None) == "cudnn":
        return _cudnn(q, k, v, segment_ids, window)
    reference = _recomputed if recompute else attention_reference
    return reference(q, k, v, q_index, segment_ids, window)


def attention_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Attention to one block of the keys, with what it takes to join blocks.

    Args:
      q: queries `[B, T, N, H]`.
      k: keys `[B, S, K, H]`; K divides N (grouped-query attention).
      v: values `[B, S, K, H]`.
      visible: `[B or 1, T, S]` bool, which keys a query may see, besides what `causal` says; none: all.
      causal: query t sees keys up to t; T == S.
      window: of the causal keys, only the last `window`.
      implementation: `auto`, `cudnn` (bf16 or fp16 on a GPU) or `xla`; a forced one fails loudly.

    Returns:
      The result `[B, T, N, H]` in q's type, and the log-sum-exp of the scores `[B, N, T]` float32. A query that sees
      none of the keys has a finite result and a log-sum-exp far below any other: it counts for nothing beside a block
      with keys that it sees.
    """
    if _choose(implementation, q, k, visible is not None, causal) == "cudnn":
        return attention_cudnn.forward(q, k, v, visible, causal, window)
    scores_BKGTS = _scores(q, k, _visible(q, k, visible, causal, window))
    lse_BKGT = jax.nn.logsumexp(scores_BKGTS, axis=-1)
    probabilities = jnp.exp(scores_BKGTS - lse_BKGT[..., None])
    return _ungroup(_weighted(probabilities, v)).astype(q.dtype), _heads(lse_BKGT)


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    visible: jax.Array | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What one block of the keys adds to the gradients of q, k and v, in their types.

    Args:
      q, k, v, visible, causal, window, implementation: as given to `attention_forward`.
      out: result `[B, T, N, H]` of all blocks together.
      lse: log-sum-exp `[B, N, T]` float32 of all blocks together.
      dout: cotangent of `out`, `[B, T, N, H]`.
    """
    if _choose(implementation, q, k, visible is not None, causal) == "cudnn":
        return attention_cudnn.backward(q, k, v, out, lse, dout, visible, causal, window)
    K = k.shape[2]
    scores_BKGTS = _scores(q, k, _visible(q, k, visible, causal, window))
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
    window: int | None = None,
) -> jax.Array:
    """Which keys each query sees, `[B or 1, T, S]` bool: none after it, of its document, in its window.

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


def _choose(implementation: str, q, k, masked: bool, causal: bool = True) -> str:
    """`cudnn` or `xla`, as `implementation` and these arrays say."""
    if implementation not in ("auto", "cudnn", "xla"):
        raise ValueError(f"implementation={implementation!r}: must be auto, cudnn or xla")
    if implementation == "auto":
        return "cudnn" if cudnn_applies(q, k, masked, causal) else "xla"
    if implementation == "cudnn" and not cudnn_applies(q, k, masked, causal):
        raise ValueError(
            "model.attention='cudnn': needs a GPU, T == S (even with a mask), bf16 or fp16 and a head dim that is a "
            f"multiple of 8 up to 256; got T={q.shape[1]}, S={k.shape[1]}, {q.dtype}, H={q.shape[3]}; "
            "use model.attention='xla'"
        )
    return implementation


def cudnn_applies(q: jax.Array, k: jax.Array, masked: bool = False, causal: bool = True) -> bool:
    """Whether cuDNN's flash attention takes these shapes and types, on the platform that is compiled for."""
    (T, _, head_dim), S = q.shape[1:], k.shape[1]
    fits = (
        q.dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and (T == S or not causal)
        and not (masked and (T % 2 or S % 2))
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
    k_index = jnp.arange(k.shape[1], dtype=jnp.int32)
    scores_BKGTS = _scores(q, k, visible_keys(q_index, k_index, segment_ids, window))
    return _ungroup(_weighted(jax.nn.softmax(scores_BKGTS, axis=-1), v)).astype(q.dtype)


def _visible(q, k, visible, causal, window):
    """`visible` and what `causal` and `window` say, as one mask; none: all."""
    if not causal:
        return visible
    ordered = visible_keys(jnp.arange(q.shape[1]), jnp.arange(k.shape[1]), window=window)
    return ordered if visible is None else ordered & visible


def _scores(q, k, visible):
    """Scaled scores `[B, K, G, T, S]` float32, a large negative number where a key may not be seen."""
    q_BKGTH = _group(q, k.shape[2])
    B, K, G, T, H = q_BKGTH.shape
    # G and T become one dim, and heads come first, so only these arrays are transposed and never the scores.
    q_BKQH, k_BKSH = q_BKGTH.reshape(B, K, G * T, H), jnp.moveaxis(k, 1, 2)
    scores = jnp.einsum("BKQH,BKSH->BKQS", q_BKQH, k_BKSH, preferred_element_type=jnp.float32)
    scores = scores.reshape(B, K, G, T, k.shape[1]) / math.sqrt(H)
    return scores if visible is None else jnp.where(visible[:, None, None], scores, UNSEEN)


def _weighted(probabilities_BKGTS, v):
    """The values' mean `[B, K, G, T, H]` under these probabilities."""
    B, K, G, T, S = probabilities_BKGTS.shape
    probabilities = probabilities_BKGTS.astype(v.dtype).reshape(B, K, G * T, S)
    out = jnp.einsum("BKQS,BKSH->BKQH", probabilities, jnp.moveaxis(v, 1, 2))
    return out.reshape(B, K, G, T, v.shape[3])


def _group(x_BTNH, K: int):
    """`[B, T, N, H]` to `[B, K, G, T, H]`."""
    B, T, N, H = x_BTNH.shape
    return jnp.moveaxis(x_BTNH.reshape(B, T, K, N // K, H), 1, 3)


def _ungroup(x_BKGTH):
    """`[B, K, G, T, H]` to `[B, T, N, H]`."""
    B, K, G, T, H = x_BKGTH.shape
    return jnp.moveaxis(x_BKGTH, 3, 1).reshape(B, T, K * G, H)


def _heads(x_BKGT):
    """`[B, K, G, T]` to `[B, N, T]`."""
    B, K, G, T = x_BKGT.shape
    return x_BKGT.reshape(B, K * G, T)


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
