"""Compute the gated delta rule of linear attention (Gated DeltaNet, arXiv 2412.06464; Qwen3-Next).

Each value head has a state S `[H, W]`, which a token decays, corrects and reads:

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T        o_t = S_t^T q_t
"""

import jax
import jax.numpy as jnp

from ultrascale_jax.config import ContextConfig, require
from ultrascale_jax.kernels.device import match_vma
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.rules import act, mesh_size

CHUNK = 64
"""Tokens that are computed at once."""


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
) -> jax.Array:
    """Return the outputs `[B, T, N, W]` of all tokens, in the type of the values.

    Args:
      query_BTKH: queries, normalised and scaled. N is a multiple of K, and head k serves N / K consecutive value heads.
      key_BTKH: keys, normalised.
      value_BTNW: values.
      log_decay_BTN: logarithm of the decay that a token begins with, float32 and at most 0.
      beta_BTN: share of the correction that a token writes.
      segment_ids_BT: document of each token, or None for one a row; a state begins at zero where it changes.
      context: how cp splits the sequence; needed where it does.
      chunk: tokens that are computed at once.
    """
    require(mesh_size("cp") == 1, "mesh.cp", mesh_size("cp"), "splits no sequence here; use 1")

    def core(q, k, v, g, beta, ids):
        B, T, N, W = v.shape
        ids = jnp.zeros((B, T), jnp.int32) if ids is None else ids
        begins = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
        g = jnp.where(begins[..., None], -jnp.inf, g)
        state = jnp.zeros((B, N, q.shape[3], W), jnp.float32)
        return gated_delta_step(*match_vma(state, q, k, v, g, beta))[1]

    dims = ("BTKH", "BTKH", "BTNW", "BTN", "BTN")
    documents = None if segment_ids_BT is None else act("BT")
    run = smap(core, in_specs=(*map(act, dims), documents), out_specs=act("BTNW"))
    return run(query_BTKH, key_BTKH, value_BTNW, log_decay_BTN, beta_BTN, segment_ids_BT)


def gated_delta_step(
    state_BNHW: jax.Array,
    query_BTKH: jax.Array,
    key_BTKH: jax.Array,
    value_BTNW: jax.Array,
    log_decay_BTN: jax.Array,
    beta_BTN: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Continue states `[B, N, H, W]` float32 by T tokens; return the states after them, and the outputs `[B, T, N, W]`.

    A token whose logarithm of decay and beta are 0 leaves the state as it is.
    """
    copies = value_BTNW.shape[2] // key_BTKH.shape[2]

    def step(S, token):
        q, k, v, g, beta = (x.astype(jnp.float32) for x in token)
        q, k = (jnp.repeat(x, copies, axis=1) for x in (q, k))
        S = S * jnp.exp(g)[..., None, None]
        correction = beta[..., None] * (v - jnp.einsum("bnhw,bnh->bnw", S, k))
        S = S + k[..., None] * correction[..., None, :]
        return S, jnp.einsum("bnhw,bnh->bnw", S, q)

    tokens = (query_BTKH, key_BTKH, value_BTNW, log_decay_BTN, beta_BTN)
    state, out = jax.lax.scan(step, state_BNHW, tuple(jnp.moveaxis(x, 1, 0) for x in tokens))
    return state, jnp.moveaxis(out, 0, 1).astype(value_BTNW.dtype)
