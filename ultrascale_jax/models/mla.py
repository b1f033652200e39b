"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries, keys and values made of short latents.

    x_BRD -> w_q_a -> norm -> gathered over sp -> w_q_b  -> queries of N heads
    x_BRD -> w_kv_a -> J: norm -> gathered over sp -> w_kv_b -> keys without positions, and values, of N heads
                       the rest: gathered over sp -> one key with rotary positions, which all heads share

The latents are a small part of D, so it is they that are sent over sp and not the residual stream. In training keys and
values are computed in full, as the report's own code does; values are narrower than keys and get zeros up to their
width.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ultrascale_jax.config import KernelsConfig, ModelConfig
from ultrascale_jax.config.kernels import AUTO
from ultrascale_jax.models.attention import attend
from ultrascale_jax.models.inputs import Cache, LayerInputs
from ultrascale_jax.models.layers import INIT_STD, gather_sequence, param, rms_norm
from ultrascale_jax.models.linear import linear
from ultrascale_jax.models.rotary import rotate
from ultrascale_jax.sharding.primitives import broadcast_param


class MLA(nnx.Module):
    """One layer of latent attention; heads are split over the tensor group, latents are not."""

    def __init__(self, cfg: ModelConfig, key: jax.Array, kernels: KernelsConfig = AUTO):
        assert cfg.latent is not None
        self.cfg, self.latent, self.kernels = cfg, cfg.latent, kernels
        D, N, H, W = cfg.d_model, cfg.num_heads, cfg.head_dim, cfg.value_dim
        Q, J, rope = cfg.latent.q_rank, cfg.latent.kv_rank, cfg.latent.rope_dim
        k_q_a, k_q_b, k_kv_a, k_kv_b, k_o = jax.random.split(key, 5)
        if Q:
            self.w_q_a = param(k_q_a, "DQ", "BRD", (D, Q))
            self.q_a_norm = param(None, "Q", "BRQ", (Q,), std=1)
            self.w_q_b = param(k_q_b, "QNH", "BTQ", (Q, N, H))
        else:
            self.w_q = param(k_q_b, "DNH", "BTD", (D, N, H))
        self.w_kv_a = param(k_kv_a, "DA", "BRD", (D, J + rope))
        self.kv_a_norm = param(None, "J", "BRJ", (J,), std=1)
        self.w_kv_b = param(k_kv_b, "JNI", "BTJ", (J, N, H - rope + W))
        self.w_o = param(k_o, "NWD", "BTNW", (N, W, D), std=INIT_STD / (2 * cfg.num_layers) ** 0.5)

    def __call__(self, x_BRD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Cache | None]:
        """Map `[B, R, D]` to partial sums `[B, T, D]` of the tensor group, and return the cache with these keys too."""
        cfg = self.cfg
        q_BTNH = self._rotate(self._queries(x_BRD), inputs.rope)
        if cfg.rope_scaling is not None:
            q_BTNH = q_BTNH * cfg.rope_scaling.score_factor
        k_BTNH, v_BTNW = self._keys_and_values(x_BRD)
        q_BTNH = checkpoint_name(q_BTNH, "q")
        k_BTNH = checkpoint_name(self._rotate(k_BTNH, inputs.rope), "k")
        v_BTNW = checkpoint_name(v_BTNW, "v")
        v_BTNH = jnp.pad(v_BTNW, ((0, 0), (0, 0), (0, 0), (0, cfg.head_dim - cfg.value_dim)))
        out_BTNH, cache = attend(self.kernels.attention, q_BTNH, k_BTNH, v_BTNH, inputs)
        out_BTNW = out_BTNH[..., : cfg.value_dim]
        return linear("BTNW,NWD->BTD", out_BTNW, self.w_o[...], partial=True), cache

    def _queries(self, x_BRD: jax.Array) -> jax.Array:
        """Project to queries `[B, T, N, H]`, not yet rotated."""
        if not self.latent.q_rank:
            return linear("BTD,DNH->BTNH", gather_sequence(x_BRD), self.w_q[...])
        latent_BRQ = linear("BRD,DQ->BRQ", x_BRD, self.w_q_a[...])
        latent_BRQ = rms_norm(latent_BRQ, self.q_a_norm[...], "Q", "BRQ", self.cfg.norm_eps)
        return linear("BTQ,QNH->BTNH", gather_sequence(latent_BRQ), self.w_q_b[...])

    def _keys_and_values(self, x_BRD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Project to keys `[B, T, N, H]`, not yet rotated, and values `[B, T, N, W]`."""
        J, nope = self.latent.kv_rank, self.cfg.head_dim - self.latent.rope_dim
        latent_BRA = linear("BRD,DA->BRA", x_BRD, self.w_kv_a[...])
        latent_BRJ, k_BRH = latent_BRA[..., :J], latent_BRA[..., J:]
        latent_BRJ = rms_norm(latent_BRJ, self.kv_a_norm[...], "J", "BRJ", self.cfg.norm_eps)
        # One all-gather for both.
        latent_BTA = gather_sequence(jnp.concatenate([latent_BRJ, k_BRH], axis=-1))
        latent_BTJ, k_BTH = latent_BTA[..., :J], latent_BTA[..., J:]
        kv_BTNI = linear("BTJ,JNI->BTNI", latent_BTJ, self.w_kv_b[...])
        shared_BTNH = broadcast_param(
            k_BTH, "BTH", "BTNH", (*kv_BTNI.shape[:3], self.latent.rope_dim)
        )
        k_BTNH = jnp.concatenate([kv_BTNI[..., :nope], shared_BTNH], axis=-1)
        return k_BTNH, kv_BTNI[..., nope:]

    def _rotate(self, x_BTNH: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Rotate the last dims of queries or keys, the pairs of neighbours put into halves."""
        nope = self.cfg.head_dim - self.latent.rope_dim
        turned = x_BTNH[..., nope:]
        turned = jnp.concatenate([turned[..., 0::2], turned[..., 1::2]], axis=-1)
        return jnp.concatenate([x_BTNH[..., :nope], rotate(turned, rope)], axis=-1)
