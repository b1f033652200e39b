"""A model as a sum of parameters: how many of which kind, and how many of them work on a token."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ultrascale_jax.config import ModelConfig
from ultrascale_jax.config.lora import LINEAR, ROUTED, Lora, Target, projections
from ultrascale_jax.config.model import FeedForward


@dataclass(frozen=True, kw_only=True)
class ModelShape(ModelConfig):
    """A model's sizes, and the numbers of parameters that follow from them."""

    @classmethod
    @functools.cache
    def of(cls, model: ModelConfig, **changes) -> "ModelShape":
        """Return the shape of `model`, with `changes`."""
        return dataclasses.replace(_of(model), **changes) if changes else _of(model)

    @functools.cached_property
    def kinds(self) -> list[tuple["ModelShape", int]]:
        """The model as if all its layers had attention of one shape, with the number of layers of each shape."""
        if self.full_attention is None:
            return [(self, self.layers)]
        uniform: dict[str, Any] = {
            "full_attention": None,
            "full_attention_every": 0,
            "rope_theta_local": 0.0,
        }
        whole = self.full_shape
        full = self.num_layers // self.layer_group
        shapes = (
            dataclasses.replace(self, **uniform),
            ModelShape.of(whole, sliding_window=None, **uniform),
        )
        return list(zip(shapes, (self.num_layers - full, full), strict=True))

    @property
    def layers(self) -> int:
        """Layers that training runs, `mtp_layers` included."""
        return self.num_layers + self.mtp_layers

    @property
    def moe_layers(self) -> int:
        """Layers with experts; the modules of `mtp_layers` have them where the last layer has."""
        if self.pattern:
            return self.pattern.count("E")
        return 0 if self.experts is None else self.layers - self.dense_layers

    @property
    def mlp_layers(self) -> int:
        """Layers with an MLP."""
        return self.pattern.count("-") if self.pattern else self.layers - self.moe_layers

    @property
    def mlp_share(self) -> float:
        """Share of the layers that have an MLP."""
        return self.mlp_layers / self.layers

    @property
    def is_mixed(self) -> bool:
        """Whether the first layers have no experts and the others have: two stacks with the same attention."""
        return 0 < self.dense_layers < self.num_layers

    @property
    def halves(self) -> int:
        """Mixers and feed-forward layers, each with a norm."""
        return len(self.pattern) or 2 * self.layers

    @property
    def halves_share(self) -> float:
        """Share of the layers' halves that are there."""
        return self.halves / (2 * self.layers)

    @property
    def expert_share(self) -> float:
        """Share of the layers that have experts."""
        return self.moe_layers / self.layers

    @property
    def join_params(self) -> int:
        """Parameters of the projections [2D, D] of `mtp_layers`."""
        return 2 * self.mtp_layers * self.d_model**2

    @property
    def shared_width(self) -> int:
        """Width of the shared experts together."""
        return 0 if self.experts is None else self.experts.shared * self.expert_d_ff

    @property
    def linear_layers(self) -> int:
        """Layers of linear attention."""
        if self.linear is None:
            return 0
        if self.pattern:
            return self.pattern.count("M")
        every = self.full_attention_every
        return self.num_layers - (self.num_layers // every if every else 0)

    @property
    def linear_share(self) -> float:
        """Share of the layers that have linear attention."""
        return self.linear_layers / self.layers

    @property
    def only_linear(self) -> int:
        """Layers that have linear attention and no other."""
        beside = self.linear is not None and self.linear.beside_attention
        return 0 if beside else self.linear_layers

    @property
    def full_layers(self) -> int:
        """Layers that have an attention that is not linear."""
        return self.pattern.count("*") if self.pattern else self.layers - self.only_linear

    @property
    def full_share(self) -> float:
        """Share of the layers that have an attention that is not linear."""
        return self.full_layers / self.layers

    @property
    def mixer_share(self) -> float:
        """Share of the layers that have some attention."""
        return (self.full_layers + self.only_linear) / self.layers

    @property
    def linear_widths(self) -> tuple[int, int]:
        """Widths of the queries, or keys, and of the values of a layer of linear attention; 0 without."""
        linear = self.linear
        if linear is None:
            return 0, 0
        return linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim

    def linear_keys(self, parts: int) -> int:
        """Return the width of the queries, or keys, that `parts` tensor-parallel devices compute: few are repeated."""
        linear = self.linear
        return 0 if linear is None else max(linear.key_heads, parts) * linear.key_dim

    @property
    def linear_gates(self) -> int:
        """Numbers of a head of values that projections of a token compute: of its decay, and of its writes."""
        return 2 if self.linear is not None and self.linear.rule == "delta" else 1

    @property
    def linear_params(self) -> int:
        """Matrix parameters of a layer of linear attention; split by heads, except the matrices of one head of keys."""
        if self.linear is None:
            return 0
        key, value = self.linear_widths
        gates = self.linear_gates * self.linear.value_heads
        return self.d_model * (2 * key + 3 * value + gates)

    @property
    def attention_matrices(self) -> tuple[float, float, float]:
        """Matrix parameters of the attention of a mean layer: split by heads, by kv heads, and by neither."""
        if len(self.kinds) > 1:
            parts = [(shape.attention_matrices, count / self.layers) for shape, count in self.kinds]
            by_heads, by_kv_heads, whole = (
                sum(share * matrices[i] for matrices, share in parts) for i in range(3)
            )
            return by_heads, by_kv_heads, whole
        linear, full = self.linear_matrices, self.full_attention_matrices
        by_heads, by_kv_heads, by_none = (
            self.linear_share * a + self.full_share * b for a, b in zip(linear, full, strict=True)
        )
        return by_heads, by_kv_heads, by_none

    @property
    def linear_matrices(self) -> tuple[int, int, int]:
        """The same of a layer of linear attention."""
        one_head = self.linear is not None and self.linear.key_heads == 1
        whole = 2 * self.d_model * self.linear_widths[0] * one_head
        return self.linear_params - whole, 0, whole

    @property
    def full_attention_matrices(self) -> tuple[int, int, int]:
        """The same of a layer that has no linear attention.

        Latent attention computes its latents with matrices that are replicated in a tensor group.
        """
        D, heads, latent = self.d_model, self.num_heads, self.latent
        if latent is None:
            width = D * self.head_dim
            from_kv = (2 - self.values_are_keys) * width * self.num_kv_heads
            return (2 + self.output_gate) * width * heads, from_kv, 0
        up = self.head_dim * (latent.q_rank or D)
        up += latent.kv_rank * (self.head_dim - latent.rope_dim + latent.v_dim)
        down = D * (latent.q_rank + latent.kv_rank + latent.rope_dim)
        return heads * (up + latent.v_dim * D), 0, down

    @property
    def attention_params(self) -> float:
        """Matrix parameters of the attention of a mean layer; grouped queries: D*H*(2N + 2K)."""
        return sum(self.attention_matrices)

    @property
    def attention_vectors(self) -> int:
        """Norms and biases of a layer that has no linear attention."""
        heads, kv_heads, H = self.num_heads, self.num_kv_heads, self.head_dim
        qk_norms = {"none": 0, "head": 2 * H, "full": (heads + kv_heads) * H}[self.qk_norm]
        biases = (heads + (2 - self.values_are_keys) * kv_heads) * H * self.qkv_bias
        biases += self.d_model * self.o_bias + heads * self.attention_sinks
        latents = 0 if self.latent is None else self.latent.q_rank + self.latent.kv_rank
        return qk_norms + biases + latents

    @property
    def vector_params(self) -> int:
        """Parameters of all layers that are no matrices: norms, biases and scales."""
        norms, linear = 4 if self.norm_placement == "both" else 2, 0
        if self.linear is not None:
            key, value = self.linear_widths
            linear = (2 * key + value) * self.linear.conv_kernel
            linear += 2 * self.linear.value_heads
            if self.linear.rule == "delta":
                linear += self.linear.value_dim
            else:
                linear += 2 * key + value + self.linear.value_heads + value * self.linear.norm
        attention = self.linear_layers * linear
        for shape, count in self.kinds:
            attention += (count - self.layers + self.full_layers) * shape.attention_vectors
        of_experts = self.hidden_biases
        if self.experts is not None:
            of_experts += self.experts.num * self.experts.bias
            of_experts += self.experts.num * (1 + self.d_model) * self.experts.biases
        modules = 3 * self.mtp_layers * self.d_model
        stream = self.halves * norms // 2 * self.d_model + self.layers * self.layer_scale
        return stream + attention + self.moe_layers * of_experts + modules

    @property
    def hidden_biases(self) -> int:
        """Biases of gate and up of all experts of a layer, which alone of all vectors are split as experts are."""
        if self.experts is None or not self.experts.biases:
            return 0
        return 2 * self.experts.num * self.expert_d_ff

    @property
    def wide_products(self) -> int:
        """Products of a feed-forward layer that are as wide as it: gate and up, or up alone."""
        return 1 + self.is_gated

    @property
    def ffn_matrices(self) -> int:
        """Matrices of a feed-forward layer, or of an expert: `wide_products` and down."""
        return self.wide_products + 1

    @property
    def mlp_params(self) -> int:
        """Parameters of the feed-forward layer of one dense layer."""
        return self.ffn_matrices * self.d_model * self.d_ff

    @property
    def expert_params(self) -> int:
        """Parameters of one expert."""
        return self.ffn_matrices * self.d_model * self.expert_d_ff

    @property
    def router_params(self) -> int:
        """Matrix parameters of a layer's router, and of the gate of its shared experts."""
        if self.experts is None:
            return 0
        return self.d_model * (self.experts.num + self.experts.shared_gate)

    @property
    def shared_params(self) -> int:
        """Matrix parameters of a layer with experts that every token meets: router and shared experts."""
        if self.experts is None:
            return 0
        return self.experts.shared * self.expert_params + self.router_params

    @property
    def dense_params(self) -> int:
        """Parameters of all layers without the routed experts, which alone are split over `ep`."""
        ffn = self.mlp_layers * self.mlp_params + self.moe_layers * self.shared_params
        attention = self.linear_layers * self.linear_params
        for shape, count in self.kinds:
            full = count - self.layers + self.full_layers
            attention += full * sum(shape.full_attention_matrices)
        return attention + ffn + self.join_params + self.vector_params

    @property
    def routed_params(self) -> int:
        """Parameters of all routed experts."""
        return (
            0 if self.experts is None else self.moe_layers * self.experts.num * self.expert_params
        )

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding, the final norm and the head; a tied table counts once."""
        tables = 1 if self.tied_embeddings else 2
        return tables * self.vocab_size * self.d_model + self.d_model

    @property
    def num_params(self) -> int:
        """All parameters."""
        return self.dense_params + self.routed_params + self.embedding_params

    @property
    def active_params(self) -> int:
        """Parameters that multiply one token: all but the embedding's lookup, the norms and idle experts."""
        visited = 0 if self.experts is None else self.experts.top_k
        routed = self.moe_layers * visited * self.expert_params
        matrices = self.dense_params - self.vector_params
        heads = 1 + self.mtp_layers
        return matrices + routed + heads * self.vocab_size * self.d_model


@functools.lru_cache
def _of(model: ModelConfig) -> ModelShape:
    fields: dict[str, Any] = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
    return ModelShape(**fields)


type Kind = FeedForward | Literal["full", "linear"]
"""Layers with a feed-forward layer of this kind, or with linear attention or another one."""


class AdapterSide(NamedTuple):
    """A or B of one weight of a layer."""

    of: Kind
    """Kind of the layers that have it."""
    num_params: int
    by_tensor: bool
    """Whether the tensor group splits it, as the base's dim that it has."""
    by_model: bool
    """Whether ZeRO splits that dim: the model's or a latent's. It splits the other sides by their rank."""
    is_routed: bool
    """Whether it is that of all routed experts, which `ep` splits."""


class AdaptedWeight(NamedTuple):
    """A weight of a layer that has an adapter, or that of all routed experts."""

    target: Target
    of: Kind
    """Kind of the layers that have it."""
    copies: int
    """Experts that have one each; 1: it is none of theirs."""
    rows: tuple[int, str]
    """Their number, and who splits them: the `tensor` group, ZeRO as the `model`'s width, or nobody (`whole`)."""
    columns: tuple[int, str]


def adapted_weights(model: ModelConfig, lora: Lora) -> list[AdaptedWeight]:
    """Return the weights of a layer to which `train.lora` gives adapters; none without."""
    if not lora.enabled:
        return []
    shape, present = ModelShape.of(model), projections(model)
    targets = [name for name in lora.targets or lora.targets_of(model) if name in present]
    return [AdaptedWeight(name, *base) for name in targets for base in _bases(shape, name)]


def adapter_sides(model: ModelConfig, lora: Lora) -> list[AdapterSide]:
    """Return the sides of the adapters that `train.lora` gives a model; none without."""
    return [
        AdapterSide(
            weight.of,
            weight.copies * lora.rank * size,
            split == "tensor",
            split == "model",
            weight.copies > 1,
        )
        for weight in adapted_weights(model, lora)
        for size, split in (weight.rows, weight.columns)
    ]


def _bases(shape: ModelShape, target: Target) -> list[tuple]:
    """Return, for the weights of a target in a layer, the kind of layers that have it, how many experts have one, and
    size and split of its rows and of its columns."""
    latent, heads = shape.latent, shape.num_heads
    model, query = (shape.d_model, "model"), (heads * shape.head_dim, "tensor")
    key = shape.num_kv_heads * shape.head_dim, "tensor"
    attention = {"q_proj": (model, query), "k_proj": (model, key), "v_proj": (model, key)}
    attention["o_proj"] = (heads * shape.value_dim, "tensor"), model
    if latent is not None:
        of_query, of_key = (latent.q_rank, "model"), (latent.kv_rank, "model")
        both = shape.head_dim - latent.rope_dim + shape.value_dim
        attention |= {"q_a_proj": (model, of_query), "q_b_proj": (of_query, query)}
        attention["kv_a_proj_with_mqa"] = model, (latent.kv_rank + latent.rope_dim, "whole")
        attention["kv_b_proj"] = of_key, (heads * both, "tensor")
    if target in attention:
        gates = shape.output_gate and target == "q_proj"
        return [("full", 1, *attention[target])] * (1 + gates)
    if shape.linear is not None and target in LINEAR[shape.linear.rule]:
        keys, values = ((width, "tensor") for width in shape.linear_widths)
        gates = shape.linear.value_heads, "tensor"
        columns: dict[str, tuple] = {
            "in_proj_qkvz": (keys, keys, values, values),
            "in_proj_ba": (gates, gates),
        }
        columns["in_proj"] = values, values, keys, keys, gates
        into = [(model, width) for width in columns.get(target, ())] or [(values, model)]
        return [("linear", 1, *sides) for sides in into]
    order = -1 if target.endswith("down_proj") else 1
    widths = [("mlp", 1, shape.d_ff), ("moe", 1, shape.shared_width)]
    if target.startswith(ROUTED) and shape.experts is not None:
        widths = [("moe", shape.experts.num, shape.expert_d_ff)]
    return [(*kind, *(model, (width, "tensor"))[::order]) for *kind, width in widths]


def adapter_params(model: ModelConfig, lora: Lora, *, active: bool = False) -> int:
    """Count the parameters of the adapters that `train.lora` gives a model, or those `active` for one token; 0
    without."""
    shape = ModelShape.of(model)
    if len(shape.kinds) > 1:
        parts = ((adapter_params(one, lora, active=active), count) for one, count in shape.kinds)
        return sum(params * count // shape.layers for params, count in parts)
    rows = {"mlp": shape.mlp_layers, "moe": shape.moe_layers}
    rows |= {"full": shape.full_layers, "linear": shape.linear_layers}
    total = 0
    for side in adapter_sides(model, lora):
        count = rows[side.of] * side.num_params
        if active and side.is_routed and shape.experts is not None:
            count = count * shape.experts.top_k // shape.experts.num
        total += count
    return total
