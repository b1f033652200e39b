"""Seconds that one GPU computes for a layer: matrix products, attention and memory traffic; no JAX."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ultrascale_jax.config.lora import ROUTED
from ultrascale_jax.kernels.document_classes import class_segments
from ultrascale_jax.plan.formulas import context, costs, linear_attention
from ultrascale_jax.plan.formulas import experts as experts_of
from ultrascale_jax.plan.formulas.activations import layer_of, mean
from ultrascale_jax.plan.formulas.framework import ULTRASCALE
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.model_shape import adapted_weights
from ultrascale_jax.plan.workload import Run, group

type Product = tuple[float, float, float, float]
"""Rows, columns and contracted dim of a matrix product, and how many of it."""


type Gives = Literal["result", "input", "weight"]
"""A product of the forward pass, or the gradient of its input or of its weight."""

PARTS = {
    "o_proj": "out",
    "out_proj": "out",
    "gate_proj": "up",
    "up_proj": "up",
    "down_proj": "down",
}
"""A target of `train.lora` to the part of `LayerTime.products` that it adds to; the others compute queries and keys."""


@dataclass(frozen=True)
class Passes:
    """One micro-batch through a mean layer, nothing repeated, no communication."""

    products: dict[str, float]
    """Matrix products of the forward pass, by part."""
    input_gradients: float
    """Products of the backward pass that give the gradients of inputs."""
    weight_gradients: float
    """Products that give the gradients of weights; with adapters of theirs alone."""
    attention: float
    attention_backward: float
    traffic: float
    """Memory traffic of both passes, a third of it of the forward pass."""

    @classmethod
    def mean(cls, parts: Sequence[tuple["Passes", float]]) -> "Passes":
        """Return the mean of the passes through layers, each with its share."""
        names = [field.name for field in dataclasses.fields(cls)]
        products = mean([(passes.products, share) for passes, share in parts])
        sums = (sum(share * getattr(one, name) for one, share in parts) for name in names[1:])
        return cls(products, *sums)

    @functools.cached_property
    def backward_products(self) -> float:
        """Time of the matrix products of the backward pass."""
        return self.input_gradients + self.weight_gradients

    @functools.cached_property
    def forward(self) -> float:
        """Time of the full forward pass."""
        return sum(self.products.values()) + self.attention + self.traffic / 3

    @functools.cached_property
    def backward(self) -> float:
        """Time of the full backward pass."""
        return self.backward_products + self.attention_backward + self.traffic * 2 / 3


class LayerTime:
    """The arithmetic of `run` on one GPU of `cluster`."""

    overheads = ULTRASCALE

    def __init__(self, run: Run, cluster: Cluster):
        self.run, self.cluster = run, cluster
        self.shape, self.mesh, self.gpu = run.shape, run.mesh, cluster.gpu
        self.tensor = group(run.mesh, ("sp", "tp"), cluster.gpus_per_node)

    @functools.cached_property
    def passes(self) -> Passes:
        """Passes of one micro-batch through a mean layer."""
        if len(self.run.kinds) > 1:
            times = [(type(self)(one, self.cluster), share) for one, share in self.run.kinds]
            return Passes.mean([(time.passes, share) for time, share in times])
        base, adapters = self.products(), self.adapters()
        every = {name: self.gemms(shapes, "result") for name, shapes in base.items()}
        inputs = sum(self.gemms(shapes, "input") for shapes in base.values())
        weights = sum(self.gemms(shapes, "weight") for shapes in base.values())
        if adapters:
            weights = 0.0
        for name, shapes in adapters.items():
            every[name] += self.gemms(shapes, "result", fp8=False)
            inputs += self.gemms(shapes, "input", fp8=False)
            weights += self.gemms(shapes, "weight", fp8=False)
        return Passes(every, inputs, weights, *self.attention(), self.traffic())

    def products(self) -> dict[str, list[Product]]:
        """Return the matrix products of a mean layer's forward pass, by part."""
        shape, n, tokens = self.shape, self.tensor.ranks, self.run.tokens
        value = shape.value_dim * shape.num_heads
        widths = (value, shape.full_share), (shape.linear_widths[1], shape.linear_share)
        out: list[Product] = [
            (tokens, shape.d_model, width / n, count) for width, count in widths if count
        ]
        by_name: dict[str, list[Product]] = {"qkv": self.queries(), "out": out}
        parts = ("", self.dense(), n), ("routed ", self.routed(), self.run.expert_mesh.tensor)
        for part, layers, split in parts:
            layers = [(rows, width / split, count) for rows, width, count in layers if count]
            by_name[part + "up"] = [
                (rows, shape.wide_products * width, shape.d_model, count)
                for rows, width, count in layers
            ]
            by_name[part + "down"] = [
                (rows, shape.d_model, width, count) for rows, width, count in layers
            ]
        return by_name

    def adapters(self) -> dict[str, list[Product]]:
        """Return the products of a mean layer's adapters, by the part to whose results theirs are added."""
        run, by_name = self.run, dict[str, list[Product]]()
        shares = {"mlp": self.shape.mlp_share, "moe": self.shape.expert_share}
        shares |= {"full": self.shape.full_share, "linear": self.shape.linear_share}
        for weight in adapted_weights(self.shape, run.lora):
            name = weight.target.removeprefix(ROUTED)
            part = "routed " * (name != weight.target) + PARTS.get(name, "qkv")
            rows, count, mesh = float(run.tokens), shares[weight.of], run.mesh
            if weight.copies > 1:
                rows, mesh = experts_of.gemm_rows(run), run.expert_mesh
                count *= experts_of.num_chunks(run) * weight.copies / mesh.ep
            into, out = (
                size / (mesh.tensor if split == "tensor" else 1)
                for size, split in (weight.rows, weight.columns)
            )
            rank = run.lora.rank
            by_name.setdefault(part, []).extend(
                [(rows, rank, into, count), (rows, out, rank, count)]
            )
        return by_name

    def queries(self) -> list[Product]:
        """Return the products that compute queries, keys and values; latents come from a GPU's part of the stream."""
        shape, n, tokens, latent = self.shape, self.tensor.ranks, self.run.tokens, self.shape.latent
        if latent is None:
            kv_heads = max(shape.num_kv_heads, n)
            heads = (1 + shape.output_gate) * shape.num_heads
            heads += (2 - shape.values_are_keys) * kv_heads
            key, value = shape.linear_keys(n), shape.linear_widths[1]
            widths = (
                (shape.head_dim * heads, shape.full_share),
                (2 * (key + value), shape.linear_share),
            )
            return [(tokens, width / n, shape.d_model, count) for width, count in widths if count]
        heads, local_tokens = shape.num_heads / n, tokens / self.mesh.sp
        kv = shape.head_dim - latent.rope_dim + latent.v_dim
        products: list[Product] = [
            (tokens, heads * shape.head_dim, latent.q_rank or shape.d_model, 1),
            (local_tokens, latent.kv_rank + latent.rope_dim, shape.d_model, 1),
            (tokens, heads * kv, latent.kv_rank, 1),
        ]
        if latent.q_rank:
            products.append((local_tokens, latent.q_rank, shape.d_model, 1))
        return products

    def dense(self) -> list[tuple[float, float, float]]:
        """Return feed-forward layers that all tokens meet: rows, the whole width, and how many a mean layer has."""
        shape, tokens, moe = self.shape, self.run.tokens, self.shape.expert_share
        return [
            (tokens, shape.d_ff, shape.mlp_share),
            (tokens, shape.shared_width, moe if shape.shared_width else 0),
        ]

    def routed(self) -> list[tuple[float, float, float]]:
        """Return the same of one GPU's routed experts."""
        shape, experts = self.shape, self.shape.experts
        if experts is None:
            return []
        count = experts_of.num_chunks(self.run) * experts.num / self.run.expert_mesh.ep
        return [(experts_of.gemm_rows(self.run), shape.expert_d_ff, shape.expert_share * count)]

    def gemms(self, shapes: list[Product], gives: Gives, *, fp8: bool = True) -> float:
        """Time the products of a forward pass, or as many of the backward pass."""
        dtype = self.run.precision
        dtype = "bf16" if dtype == "fp8" and not fp8 else dtype
        seconds = 0.0
        for m, n, k, count in shapes:
            sizes = {"result": (m, n, k), "input": (m, k, n), "weight": (k, n, m)}[gives]
            seconds += count * costs.gemm_seconds(self.gpu, *sizes, dtype)
        return seconds

    def attention(self) -> tuple[float, float]:
        """Time a mean layer's attention, forward and backward."""
        linear, shape = linear_attention.seconds(self.run, self.gpu), self.shape
        forward, backward = (
            shape.linear_share * of_linear + shape.full_share * of_full
            for of_linear, of_full in zip(linear, self.full_attention(), strict=True)
        )
        return forward, backward

    def full_attention(self) -> tuple[float, float]:
        """Forward pass, and backward pass: five products to the forward pass' two, for the scores are made again."""
        run, shape = self.run, self.shape
        joining = context.merge_seconds(run, self.gpu)
        if layer_of(run).scores:
            forward, backward = self.attention_in_memory()
            return forward + joining, backward + joining
        query = run.tokens * shape.num_heads * shape.head_dim / self.tensor.ranks
        flops = 12 * query * self.keys()
        one = {"head_dim": shape.head_dim}
        masking, masking_back = (costs.memory_seconds(self.gpu, x) for x in self.document_bytes())
        forward = costs.attention_seconds(self.gpu, flops / 3, **one)
        backward = costs.attention_seconds(self.gpu, flops * 5 / 6, backward=True, **one)
        return forward + joining + masking, backward + joining + masking_back

    def attention_in_memory(self) -> tuple[float, float]:
        """Time attention whose scores are in memory: all of them, seen or not, in two products and then in five.

        XLA writes and reads scores in float32 and probabilities in the type of compute. The gradients of queries and
        keys are products of float32 scores. A product's time has its numbers in bfloat16; the others are added.
        """
        run, layer = self.run, layer_of(self.run)
        keys = run.seq_len / run.ring[0]
        scores = layer.scores * max(1.0, self.keys() / keys)
        a, dtype = layer.width, "fp32" if run.precision == "fp32" else "bf16"
        sizes = scores / keys, keys, self.shape.head_dim
        one, wide = (costs.gemm_seconds(self.gpu, *sizes, kind) for kind in (dtype, "fp32"))
        softmax, gradients = (4 + 2 * a) * scores, (18 + 4 * a) * scores
        forward = 2 * one + costs.memory_seconds(self.gpu, softmax)
        return forward, 3 * one + 2 * wide + costs.memory_seconds(self.gpu, gradients)

    def document_bytes(self) -> tuple[float, float]:
        """Count what ends of documents inside a sequence move in memory, forward and backward.

        A mask has two bytes a score, read once for all heads. For packed documents the results and gradients of each
        class are read, and one is written; the backward pass of a class clears float32 gradients for its segments.
        """
        run, layer = self.run, layer_of(self.run)
        if not run.document_mask or layer.scores:
            return 0.0, 0.0
        if not run.packs_documents:
            mask = 2.0 * run.tokens * run.ring[1] * self.keys()
            return mask, mask
        room = class_segments(run.seq_len // run.ring[0])
        moved, cleared = layer.width * (len(room) + 1), 4 * sum(room) * layer.query
        return moved * layer.query, moved * (layer.query + 2 * layer.key) + cleared

    def keys(self) -> float:
        """Count the keys that attention computes for a query of a mean layer."""
        window, windowed = self.shape.sliding_window, self.shape.window_share
        keys = (1 - windowed) * self.run.keys(None) if windowed < 1 else 0.0
        return keys + (windowed * self.run.keys(window) if windowed else 0.0)

    def traffic(self) -> float:
        """Time norms, residual sums, rotary embeddings, activation functions, sorting rows; forward and backward.

        In fp8 twice: what XLA compiles to cast inputs and gradients of the products in both orientations moves 8 bytes
        a value, 26 passes of d_model and 12 of d_ff. In float32 twice as many bytes. The results of adapters are added
        to the base's, and so are the gradients of their inputs, in three passes each.
        """
        shape, moe = self.shape, self.shape.expert_share
        d_ff = shape.mlp_share * shape.d_ff + moe * shape.shared_width
        d_ff *= shape.ffn_matrices / 3
        width = self.overheads.passes * (shape.halves_share * shape.d_model + d_ff / 2)
        if shape.norm_placement == "both":
            width += 2 * self.overheads.norm_passes * shape.d_model
        if shape.qk_norm != "none":
            heads = shape.num_heads + (1 + shape.value_norm) * shape.num_kv_heads
            width += self.overheads.norm_passes * heads * shape.head_dim
        values = width / self.tensor.ranks * self.run.tokens
        for shapes in self.adapters().values():
            values += 3 * sum(m * n * k * count for m, n, k, count in shapes) / self.run.lora.rank
        size = values * (2 if self.run.precision == "bf16" else 4)
        return costs.memory_seconds(self.gpu, size + moe * experts_of.traffic_bytes(self.run))
