"""Mamba-2 (arXiv 2405.21060): linear attention whose tokens add to the state, as in Granite 4 and Falcon-H1.

    x -> w_q, w_k, w_v -> short convolution + bias -> silu -> q, k, v --|
    x -> w_a -> dt = softplus(a + dt_bias) -----------------------------|- rule - + skip v - * silu(z) - norm - w_o
    x -> w_z -> z -----------------------------------------------------------------------------|

The paper calls q, k and v C, B and x. A token writes dt v after a decay by exp(-exp(a_log) dt). The norm is over the
heads of values that one head of keys serves; some models have none.
"""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from ultrascale_jax.kernels.device import match_vma
from ultrascale_jax.models.layers import param
from ultrascale_jax.models.linear import linear
from ultrascale_jax.models.linear_attention import LinearAttention, uniform
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.primitives import broadcast_param, mean
from ultrascale_jax.sharding.rules import act, specs

TIME_STEPS = 1e-3, 0.1
"""Bounds between which the logarithms of time steps are drawn."""


class Mamba2(LinearAttention):
    """One layer of Mamba-2."""

    delta: ClassVar[bool] = False
    decays: ClassVar[tuple[float, float]] = (1.0, 16.0)

    def _add_params(self, key: jax.Array) -> None:
        K, N = self.linear.key_heads, self.linear.value_heads
        H, W = self.linear.key_dim, self.linear.value_dim
        self.b_q = param(None, "KH", "BTKH", (K, H), std=0)
        self.b_k = param(None, "KH", "BTKH", (K, H), std=0)
        self.b_v = param(None, "NW", "BTNW", (N, W), std=0)
        dt = jnp.exp(uniform(key, self.dt_bias, *map(math.log, TIME_STEPS)))
        self.dt_bias.set_value(dt + jnp.log(-jnp.expm1(-dt)))  # the inverse of softplus
        self.skip = param(None, "N", "BTNW", (N,), std=1)
        if self.linear.norm:
            self.scale = param(None, "NW", "BTNW", (N, W), std=1)

    def _gates(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the logarithm of each head's decay and its time step `[B, T, N]`, float32."""
        a_BTN = linear("BTD,DN->BTN", x_BTD, self.w_a[...]).astype(jnp.float32)
        bias_BTN, log_BTN = (
            broadcast_param(p[...], "N", "BTN", a_BTN.shape) for p in (self.dt_bias, self.a_log)
        )
        dt_BTN = jax.nn.softplus(a_BTN + bias_BTN)
        if self.linear.step_min:
            dt_BTN = jnp.maximum(dt_BTN, self.linear.step_min)
        return -jnp.exp(log_BTN) * dt_BTN, dt_BTN

    def _activations(self, dtype: jax.typing.DTypeLike) -> list[Callable[[jax.Array], jax.Array]]:
        return [lambda y: jax.nn.silu(y).astype(dtype)] * 3

    def _biases(self) -> Sequence[jax.Array | None]:
        return [self._heads(f"b_{name}") for name in ("q", "k", "v")]

    def _gated(self, out_BTNW: jax.Array, v_BTNW: jax.Array, z_BTNW: jax.Array) -> jax.Array:
        """Add the skipped values to the rule's result, multiply it by its gate, and normalise it if there is a norm."""
        keys, each = self.linear.key_heads, self.linear.value_heads // self.linear.key_heads

        def run(out, v, z, skip, *scale):
            out, v, z, skip, *scale = match_vma(out, v, z, skip, *scale)
            y = out.astype(jnp.float32) + skip[None, None, :, None] * v.astype(jnp.float32)
            y *= jax.nn.silu(z.astype(jnp.float32))
            if not scale:
                return y.astype(out.dtype)
            square = jnp.square(y)
            if keys == 1:
                variance = mean(square, "NW", "BTNW")
            else:  # the tensor group splits no head of keys
                groups = square.reshape(*square.shape[:2], -1, each, square.shape[-1])
                variance = jnp.repeat(jnp.mean(groups, (3, 4)), each, axis=2)[..., None]
            y *= jax.lax.rsqrt(variance + self.cfg.norm_eps) * scale[0][None, None]
            return y.astype(out.dtype)

        operands = out_BTNW, v_BTNW, z_BTNW, self.skip[...]
        operands += (self.scale[...],) if self.linear.norm else ()
        return smap(run, in_specs=specs(operands), out_specs=act("BTNW"))(*operands)
