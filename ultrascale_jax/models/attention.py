"""Grouped-query attention with rotary embeddings, over the tensor group and packed documents."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ultrascale_jax.config import KernelsConfig, ModelConfig, require_choice
from ultrascale_jax.config.kernels import AUTO, AttentionImplementation
from ultrascale_jax.kernels.attention import attention
from ultrascale_jax.models.inputs import Cache, LayerInputs
from ultrascale_jax.models.layers import INIT_STD, gather_sequence, param, rms_norm
from ultrascale_jax.models.linear import linear, map_columns
from ultrascale_jax.models.rotary import rotate
from ultrascale_jax.parallel.context.attention import context_attention
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.primitives import (
    broadcast_param,
    name_product,
    offset,
    repeat_kv_heads,
    reshard,
)
from ultrascale_jax.sharding.rules import act, mesh_size, out_sharding, specs

type Partial = jax.Array | tuple[jax.Array, jax.Array]
"""Partial sums `[B, T, D]` of the tensor group, and `[B, R, D]` to add to their sum if there is a bias."""


class Attention(nnx.Module):
    """One attention layer; heads are split over the tensor group."""

    def __init__(self, cfg: ModelConfig, key: jax.Array, kernels: KernelsConfig = AUTO):
        self.cfg, self.kernels = cfg, kernels
        D, N, K, H = cfg.d_model, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        k_q, k_k, k_v, k_o = jax.random.split(key, 4)
        self.w_q = param(k_q, "DNH", "BTD", (D, N, H))
        self.w_k = param(k_k, "DKH", "BTD", (D, K, H))
        if not cfg.values_are_keys:
            self.w_v = param(k_v, "DKH", "BTD", (D, K, H))
        std, multiplier = INIT_STD / (2 * cfg.num_layers) ** 0.5, cfg.multiplier("attn_o")
        self.w_o = param(k_o, "NHD", "BTNH", (N, H, D), std=std, multiplier=multiplier)
        if cfg.qkv_bias:
            self.b_q = param(None, "NH", "BTNH", (N, H), std=0)
            self.b_k = param(None, "KH", "BTKH", (K, H), std=0)
            if not cfg.values_are_keys:
                self.b_v = param(None, "KH", "BTKH", (K, H), std=0)
        if cfg.o_bias:
            self.b_o = param(None, "D", "BRD", (D,), std=0)
        if cfg.output_gate:
            k_gate = jax.random.fold_in(key, 4)
            self.w_gate = param(k_gate, "DNH", "BTD", (D, N, H))
        if cfg.attention_sinks:
            self.sinks = param(None, "N", "BTN", (N,), std=0)
        if cfg.qk_norm == "head":
            self.q_norm = param(None, "H", "BTNH", (H,), std=1)
            self.k_norm = param(None, "H", "BTKH", (H,), std=1)
        if cfg.qk_norm == "full":
            self.q_norm = param(None, "NH", "BTNH", (N, H), std=1)
            self.k_norm = param(None, "KH", "BTKH", (K, H), std=1)

    def __call__(self, x_BRD: jax.Array, inputs: LayerInputs) -> tuple[Partial, Cache | None]:
        """Map `[B, R, D]` to partial sums `[B, T, D]` of the tensor group, and return the cache with these keys too."""
        partial_BTD, cache = self.mix(gather_sequence(x_BRD), inputs)
        if not self.cfg.o_bias:
            return partial_BTD, cache
        bias_BRD = broadcast_param(self.b_o[...], "D", "BRD", x_BRD.shape).astype(x_BRD.dtype)
        return (partial_BTD, bias_BRD), cache

    def mix(self, x_BTD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Cache | None]:
        """Return the same of all positions of the tensor group, `[B, T, D]`, without the bias."""
        q_BTNH, k_BTKH, *products = self._project(x_BTD)
        q_BTNH, k_BTKH = self._biased(q_BTNH, "q", "N"), self._biased(k_BTKH, "k", "K")
        if self.cfg.qk_norm != "none":
            # The norm's backward pass reads its input: kept after it, products would run again, and not rotation alone.
            q_BTNH, k_BTKH = checkpoint_name(q_BTNH, "q"), checkpoint_name(k_BTKH, "k")
        v_BTKH = k_BTKH
        if not self.cfg.values_are_keys:
            v_BTKH = checkpoint_name(self._biased(products.pop(0), "v", "K"), "v")
        if self.cfg.value_norm:
            v_BTKH = rms_norm(v_BTKH, None, "H", "BTKH", self.cfg.norm_eps)
        q_BTNH, k_BTKH = self._normed(q_BTNH, "q", "N"), self._normed(k_BTKH, "k", "K")
        q_BTNH = rotate(q_BTNH, inputs.query_rope or inputs.rope, self.cfg.score_scale)
        k_BTKH = rotate(k_BTKH, inputs.rope)
        if self.cfg.qk_norm == "none":  # otherwise what the norm reads is named
            q_BTNH, k_BTKH = name_product(q_BTNH, "q"), name_product(k_BTKH, "k")
        sinks = self.sinks[...] if self.cfg.attention_sinks else None
        out_BTNH, cache = attend(self.kernels.attention, q_BTNH, k_BTKH, v_BTKH, inputs, sinks)
        if self.cfg.output_gate:
            gate_BTNH = checkpoint_name(products[0], "attn_gate").astype(jnp.float32)
            out_BTNH = (out_BTNH * jax.nn.sigmoid(gate_BTNH)).astype(out_BTNH.dtype)
        return linear("BTNH,NHD->BTD", out_BTNH, self.w_o[...], partial=True), cache

    def _project(self, x_BTD: jax.Array) -> list[jax.Array]:
        """Project to queries, keys, values unless they are the keys, and the gate of the result if there is one."""
        names, heads = ["q", "k"], "NK"
        if not self.cfg.values_are_keys:
            names, heads = [*names, "v"], f"{heads}K"
        if self.cfg.output_gate:
            names, heads = [*names, "gate"], f"{heads}N"
        products = []
        for name, letter in zip(names, heads, strict=True):
            local_heads = functools.partial(self._heads, f"w_{name}", f"D{letter}H")
            weight = map_columns(local_heads, getattr(self, f"w_{name}")[...])
            products.append(linear(f"BTD,D{letter}H->BT{letter}H", x_BTD, weight))
        return products

    def _biased(self, y: jax.Array, name: str, heads: str) -> jax.Array:
        """Add the bias to queries, keys or values, where the model has one."""
        if not self.cfg.qkv_bias:
            return y
        dims = f"{heads}H"
        bias = broadcast_param(self._heads(f"b_{name}", dims), dims, f"BT{dims}", y.shape)
        return y + bias.astype(y.dtype)

    def _normed(self, y: jax.Array, name: str, heads: str) -> jax.Array:
        """Normalise queries or keys, where the model does that."""
        if self.cfg.qk_norm == "none":
            return y
        over = "H" if self.cfg.qk_norm == "head" else f"{heads}H"
        weight = self._heads(f"{name}_norm", over)
        return rms_norm(y, weight, over, f"BT{heads}H", self.cfg.norm_eps)

    def _heads(self, name: str, dims: str, value: jax.Array | None = None) -> jax.Array:
        """Return a parameter of this device's heads, or `value` in its place."""
        weight = getattr(self, name)
        value = weight[...] if value is None else value
        return repeat_kv_heads(value, dims, weight.act_dims, self.cfg.num_kv_heads)


def attend(
    implementation: AttentionImplementation,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    inputs: LayerInputs,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, Cache | None]:
    """Attend over the sequence, wherever it is split; return `[B, T, N, H]`, and the cache with these keys and values.

    Queries and keys have their positions already; `sinks` `[N]` are logits of the heads, as `attention` takes them.
    """
    require_choice("implementation", implementation, AttentionImplementation)
    if inputs.cache is None and mesh_size("cp") > 1:
        return _over_context(implementation, q_BTNH, k_BTKH, v_BTKH, inputs, sinks), None
    k_BSKH, v_BSKH = (reshard("BTKH->BSKH", t) for t in (k_BTKH, v_BTKH))
    start, cache = jnp.int32(0), None
    if inputs.cache is not None:
        cached_k, cached_v, start = inputs.cache
        k_BSKH = jax.lax.dynamic_update_slice_in_dim(cached_k, k_BSKH, start, axis=1)
        v_BSKH = jax.lax.dynamic_update_slice_in_dim(cached_v, v_BSKH, start, axis=1)
        implementation, cache = "xla", (k_BSKH, v_BSKH, start + q_BTNH.shape[1])
    return _core(implementation, q_BTNH, k_BSKH, v_BSKH, start, inputs, sinks), cache


def _over_context(implementation, q_BTNH, k_BTKH, v_BTKH, inputs: LayerInputs, sinks):
    """Attend on this device's heads and shard of the sequence, whose ranks communicate over cp."""

    def core(q, k, v, segments, full, sinks):
        return context_attention(
            inputs.context, q, k, v, axis="cp", segment_ids=segments, window=inputs.window, full=full,
            sinks=sinks, implementation=implementation,
        )[0]  # fmt: skip

    dims = ("BTNH", "BTKH", "BTKH", "BT", "")
    run = smap(core, in_specs=(*map(act, dims), specs(sinks)), out_specs=act("BTNH"))
    return run(q_BTNH, k_BTKH, v_BTKH, inputs.segment_ids_BT, inputs.full, sinks)


def _core(implementation, q_BTNH, k_BSKH, v_BSKH, start, inputs: LayerInputs, sinks):
    """Attend on this device's heads; keys and values are unsharded over cp, in natural order."""

    def core(q, k, v, index, segments, full, sinks):
        return attention(
            q, k, v, q_index=index, segment_ids=segments, window=inputs.window, full=full, sinks=sinks,
            recompute=inputs.recompute, implementation=implementation,
        )  # fmt: skip

    T, segments = q_BTNH.shape[1], None
    index_T = (
        start + offset("T", T) + jnp.arange(T, dtype=jnp.int32, out_sharding=out_sharding(act("T")))
    )
    if inputs.segment_ids_BT is not None:
        segments = (inputs.segment_ids_BT, reshard("BT->BS", inputs.segment_ids_BT))
    documents = None if segments is None else (act("BT"), act("BS"))
    in_specs = (*map(act, ("BTNH", "BSKH", "BSKH", "T")), documents, act(""), specs(sinks))
    run = smap(core, in_specs=in_specs, out_specs=act("BTNH"))
    return run(q_BTNH, k_BSKH, v_BSKH, index_T, segments, inputs.full, sinks)
