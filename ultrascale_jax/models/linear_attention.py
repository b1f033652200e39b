"""Linear attention of Qwen3-Next: Gated DeltaNet (arXiv 2412.06464), a layer whose memory of the past has a fixed size.

    x -> w_q, w_k, w_v -> short convolution -> silu -> q, k of length one --|
    x -> w_a -> log_decay = -exp(a_log) softplus(a + dt_bias) --------------|- gated delta rule - norm - * silu(z) - w_o
    x -> w_b -> beta = sigmoid(b) ------------------------------------------|                             |
    x -> w_z -> z ----------------------------------------------------------------------------------------|

A head of queries and keys serves several heads of values. Heads are split over the tensor group, and the sequence over
cp, as in other attention. `mamba.py` has the layer with another rule.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ultrascale_jax.config import KernelsConfig, ModelConfig
from ultrascale_jax.config.kernels import AUTO
from ultrascale_jax.models.inputs import Cache, LayerInputs
from ultrascale_jax.models.layers import INIT_STD, gather_sequence, param, rms_norm
from ultrascale_jax.models.linear import linear, map_columns
from ultrascale_jax.parallel.context.short_convolution import short_convolution
from ultrascale_jax.parallel.gated_delta_rule import gated_delta_rule, gated_delta_step
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.primitives import broadcast_param, repeat_kv_heads, reshard
from ultrascale_jax.sharding.rules import act, out_sharding, specs

QK_NORM_EPS = 1e-6
"""Added to the square of the length of queries and keys."""


class LinearAttention(nnx.Module):
    """One layer of linear attention."""

    delta: ClassVar[bool] = True
    """Whether tokens correct the state."""
    decays: ClassVar[tuple[float, float]] = (0.01, 16.0)
    """Bounds between which decays are drawn."""

    def __init__(self, cfg: ModelConfig, key: jax.Array, kernels: KernelsConfig = AUTO):
        assert cfg.linear is not None
        self.cfg, self.linear, self.kernels = cfg, cfg.linear, kernels
        D, K, N = cfg.d_model, cfg.linear.key_heads, cfg.linear.value_heads
        H, W, O = cfg.linear.key_dim, cfg.linear.value_dim, cfg.linear.conv_kernel  # noqa: E741
        k_q, k_k, k_v, k_z, k_b, k_a, k_o, k_conv, k_decay = jax.random.split(key, 9)
        by = {name: cfg.multiplier(f"linear_{name}") for name in "qkvzao"}
        self.w_q = param(k_q, "DKH", "BTD", (D, K, H), multiplier=by["q"])
        self.w_k = param(k_k, "DKH", "BTD", (D, K, H), multiplier=by["k"])
        self.w_v = param(k_v, "DNW", "BTD", (D, N, W), multiplier=by["v"])
        self.w_z = param(k_z, "DNW", "BTD", (D, N, W), multiplier=by["z"])
        self.w_a = param(k_a, "DN", "BTD", (D, N), multiplier=by["a"])
        k_q, k_k, k_v = jax.random.split(k_conv, 3)
        std = (3 * O) ** -0.5
        self.conv_q = param(k_q, "KHO", "BTKH", (K, H, O), std=std)
        self.conv_k = param(k_k, "KHO", "BTKH", (K, H, O), std=std)
        self.conv_v = param(k_v, "NWO", "BTNW", (N, W, O), std=std)
        self.a_log = param(None, "N", "BTN", (N,), std=0)
        self.a_log.set_value(jnp.log(uniform(k_decay, self.a_log, *self.decays)))
        self.dt_bias = param(None, "N", "BTN", (N,), std=1)
        self._add_params(k_b)
        std = INIT_STD / (2 * cfg.num_layers) ** 0.5
        self.w_o = param(k_o, "NWD", "BTNW", (N, W, D), std=std, multiplier=by["o"])

    def __call__(self, x_BRD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Cache | None]:
        """Map `[B, R, D]` to partial sums `[B, T, D]` of the tensor group, and return the cache after these tokens."""
        return self.mix(gather_sequence(x_BRD), inputs)

    def mix(self, x_BTD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Cache | None]:
        """Return the same of all positions of the tensor group, `[B, T, D]`."""
        *qkv, z_BTNW = (
            linear(f"BTD,D{dims}->BT{dims}", x_BTD, self._heads(f"w_{name}"))
            for name, dims in (("q", "KH"), ("k", "KH"), ("v", "NW"), ("z", "NW"))
        )
        qkv = [checkpoint_name(y, name) for y, name in zip(qkv, "qkv", strict=True)]
        z_BTNW = checkpoint_name(z_BTNW, "attn_gate")
        decay_BTN, beta_BTN = self._gates(x_BTD)
        previous = [None] * 3 if inputs.cache is None else inputs.cache[:3]
        tokens = *self._convolved(qkv, inputs, previous), decay_BTN, beta_BTN
        if inputs.cache is None:
            where = {"segment_ids_BT": inputs.segment_ids_BT, "context": inputs.context}
            out_BTNW, cache = gated_delta_rule(*tokens, **where, delta=self.delta), None
        else:
            out_BTNW, cache = self._continued(qkv, tokens, inputs)
        out_BTNW = self._gated(out_BTNW, tokens[2], z_BTNW)
        return linear("BTNW,NWD->BTD", out_BTNW, self.w_o[...], partial=True), cache

    def _add_params(self, key: jax.Array) -> None:
        """Make the parameters that another rule has not."""
        D, N, W = self.cfg.d_model, self.linear.value_heads, self.linear.value_dim
        self.w_b = param(key, "DN", "BTD", (D, N))
        self.scale = param(None, "W", "BTNW", (W,), std=1)

    def _heads(self, name: str) -> Any:
        """Return a parameter of this device's heads."""
        param = getattr(self, name)
        repeated = functools.partial(
            repeat_kv_heads,
            dims=param.dims,
            act_dims=param.act_dims,
            num_kv_heads=self.linear.key_heads,
        )
        return map_columns(repeated, param[...])

    def _gates(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the logarithm of each head's decay and the strength of its update `[B, T, N]`, float32."""
        a_BTN = linear("BTD,DN->BTN", x_BTD, self.w_a[...]).astype(jnp.float32)
        b_BTN = linear("BTD,DN->BTN", x_BTD, self.w_b[...]).astype(jnp.float32)
        dt_BTN, log_BTN = (
            broadcast_param(p[...], "N", "BTN", a_BTN.shape) for p in (self.dt_bias, self.a_log)
        )
        return -jnp.exp(log_BTN) * jax.nn.softplus(a_BTN + dt_BTN), jax.nn.sigmoid(b_BTN)

    def _gated(self, out_BTNW: jax.Array, v_BTNW: jax.Array, z_BTNW: jax.Array) -> jax.Array:
        """Normalise the rule's result, and multiply it by its gate; `v_BTNW` are the values."""
        out_BTNW = rms_norm(out_BTNW, self.scale[...], "W", "BTNW", self.cfg.norm_eps)
        gate_BTNW = jax.nn.silu(z_BTNW.astype(jnp.float32))
        return (out_BTNW.astype(jnp.float32) * gate_BTNW).astype(v_BTNW.dtype)

    def _activations(self, dtype: jax.typing.DTypeLike) -> list[Callable[[jax.Array], jax.Array]]:
        """Return what follows the convolution of queries, keys and values: silu; then queries and keys of length one,
        and scores scaled."""
        scale = self.linear.key_dim**-0.5
        return [
            lambda y: (_unit(jax.nn.silu(y)) * scale).astype(dtype),
            lambda y: _unit(jax.nn.silu(y)).astype(dtype),
            lambda y: jax.nn.silu(y).astype(dtype),
        ]

    def _biases(self) -> Sequence[jax.Array | None]:
        """Return the biases of the convolutions."""
        return [None] * 3

    def _convolved(
        self, qkv: list[jax.Array], inputs: LayerInputs, previous: Sequence[jax.Array | None]
    ) -> list[jax.Array]:
        """Return queries, keys and values as the rule takes them: convolved along the sequence, after the
        `previous` tokens, and activated."""
        taps = [self._heads(f"conv_{name}") for name in ("q", "k", "v")]
        then, dims = self._activations(qkv[0].dtype), ("BTKH", "BTKH", "BTNW")
        where = inputs.segment_ids_BT, inputs.context
        return [
            short_convolution(y, taps, dims, *where, last, bias, then)
            for y, taps, dims, last, bias, then in zip(
                qkv, taps, dims, previous, self._biases(), then, strict=True
            )
        ]

    def _continued(
        self, qkv: list[jax.Array], tokens: Sequence[jax.Array], inputs: LayerInputs
    ) -> tuple[jax.Array, Cache]:
        """Return the rule's result after the tokens of the cache, and the cache with the first `length` of these."""
        assert inputs.cache is not None
        *previous, state_BNHW, start = inputs.cache
        *activated, decay_BTN, beta_BTN = tokens
        T, halo = beta_BTN.shape[1], self.linear.conv_kernel - 1
        length = jnp.int32(T) if inputs.length is None else inputs.length
        kept = [
            jax.lax.dynamic_slice_in_dim(jnp.concatenate(pair, axis=1), length, halo, axis=1)
            for pair in zip(previous, qkv, strict=True)
        ]
        is_new = jax.lax.broadcasted_iota(jnp.int32, beta_BTN.shape, 1) < length
        is_new = jax.reshard(is_new, act("BTN"))
        decay_BTN, beta_BTN = (jnp.where(is_new, g, 0) for g in (decay_BTN, beta_BTN))
        dims = ("BTKH", "BTKH", "BTNW", "BTN", "BTN")
        whole = [  # all of them on each device: the state is
            reshard(f"{letters}->{letters.replace('T', 'S')}", y)
            for letters, y in zip(dims, (*activated, decay_BTN, beta_BTN), strict=True)
        ]
        arrays = state_BNHW, *whole
        step = functools.partial(gated_delta_step, delta=self.delta)
        run = smap(step, in_specs=specs(arrays), out_specs=(act("BNHW"), act("BSNW")))
        state_BNHW, out_BSNW = run(*arrays)
        out_BTNW = reshard("BSNW->BTNW", out_BSNW)
        return out_BTNW, (*kept, state_BNHW, start + T)


def uniform(key: jax.Array, like: nnx.Param, least: float, most: float) -> jax.Array:
    """Draw numbers between two bounds, sharded as a parameter."""
    value = like[...]
    spec = out_sharding(jax.typeof(value).sharding.spec)
    return jax.random.uniform(key, value.shape, minval=least, maxval=most, out_sharding=spec)


def _unit(x: jax.Array) -> jax.Array:
    """Divide by the length of the last dim."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + QK_NORM_EPS)
