"""Count the parameters that one GPU works on, and the ones that it keeps; no JAX."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from ultrascale_jax.config import padded_vocab_size
from ultrascale_jax.plan.formulas import experts, pipeline
from ultrascale_jax.plan.model_shape import ModelShape, adapter_sides
from ultrascale_jax.plan.workload import Run, of_sizes


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters of one pipeline stage on one GPU of its tensor group, gathered over the axes of ZeRO."""

    dense: float
    """Matrices of its layers, without routed experts."""
    experts: float
    """Routed experts of its layers, which `ep` splits."""
    table: float
    """The embedding's table, or the head."""
    tables: float
    """Both; a tied one counts once."""
    vectors: float
    """Norms and biases, replicated on every GPU except the experts'; rows of padding have theirs."""
    attention: float
    """Matrices of the attention of one layer."""
    matrix: float
    """One matrix of the widest dense feed-forward layer."""
    routed: float
    """One matrix of all routed experts of a layer."""
    layers: float
    """Layers."""
    padding: float = 0.0
    """Matrices of attention in rows of padding, which are only stored (`schedules.stack_orders`)."""

    @property
    def blocks(self) -> float:
        """Matrices of its layers."""
        return self.dense + self.experts


@of_sizes
def weights_of(run: Run) -> Weights:
    """Return the parameters that one GPU works on.

    Kv heads that the tensor group outnumbers are on all its GPUs, and so are the router, what makes the latents of
    latent attention, and the projections of `model.mtp_layers`. Every rank of a pipeline has as many layers as the
    fullest, as many rows of each kind as its stack has, and its part of the vocabulary.
    """
    shape, mesh, experts = run.shape, run.mesh, run.shape.experts
    t, D, layers = mesh.tensor, shape.d_model, run.rank_layers + run.head_modules
    attention = 0.0
    for one, count in shape.kinds:
        attention += _on_one(one.attention_matrices, one, t) * count / shape.layers
    routed, shared = 0.0, 0.0
    if experts is not None:
        routed = experts.num * shape.expert_params / (mesh.ep * t)
        shared = experts.shared * shape.expert_params / t + shape.router_params
    mlp, moe = stack_rows(run)
    padding = mlp + moe - layers if shape.is_mixed else 0
    width = max(shape.d_ff if mlp else 0, shape.shared_width)
    table = padded_vocab_size(shape.vocab_size, t * mesh.pp) * D / (t * mesh.pp)
    return Weights(
        dense=layers * attention + mlp * shape.mlp_params / t + moe * shared + shape.join_params,
        experts=moe * routed,
        table=table,
        tables=table if shape.tied_embeddings else 2 * table,
        vectors=(layers + padding) * shape.vector_params / shape.layers
        + D
        - moe * shape.hidden_biases * (1 - 1 / (mesh.ep * t)),
        attention=attention,
        matrix=D * width / t,
        routed=routed / shape.ffn_matrices,
        layers=layers,
        padding=padding * attention,
    )


def stack_rows(run: Run) -> tuple[float, float]:
    """Count the rows that a rank has of the stacks of dense layers, and of layers of experts, padding included, and the
    modules of `model.mtp_layers`."""
    shape, layers = run.shape, run.rank_layers + run.head_modules
    if run.mesh.pp > 1 and shape.is_mixed:
        dense, routed = pipeline.stack_rows(run)
        return dense, routed + run.head_modules
    return layers * shape.mlp_share, layers * shape.expert_share


def _on_one(matrices: tuple[float, float, float], shape: ModelShape, parts: int) -> float:
    """Count the parameters of `attention_matrices` on one GPU of a tensor group of `parts`."""
    by_heads, by_kv_heads, whole = matrices
    return by_heads / parts + by_kv_heads / min(parts, shape.num_kv_heads) + whole


class Row(NamedTuple):
    """The largest row of a stack."""

    params: float
    """Parameters on one GPU, gathered over the axes of ZeRO."""
    layers: int
    """Layers of it."""
    rows: int
    """Rows of its stack."""


def largest_row(run: Run, weights: Weights) -> Row:
    """Return the largest row of the stacks: a layer, or a group."""
    shape = run.shape
    if not shape.pattern:
        group = shape.layer_group
        one = weights.attention + shape.ffn_matrices * (weights.matrix + weights.routed)
        return Row(group * one, group, math.ceil(shape.layers / group))
    rows = []
    for layers in shape.stacks:
        kinds = shape.kinds_of_layers[layers.start : layers.start + layers.step]
        params = sum(_half_params(run, weights, half) for half in "".join(kinds))
        rows.append(Row(params, layers.step, len(layers)))
    return max(rows)


def layer_params(run: Run, weights: Weights) -> float:
    """Count the parameters of the largest row of a stack on one GPU, gathered over the axes of ZeRO."""
    return largest_row(run, weights).params


def _half_params(run: Run, weights: Weights, half: str) -> float:
    """Count the parameters on one GPU of a half of a layer, by its letter in the pattern."""
    shape, t = run.shape, run.mesh.tensor
    matrices = {"M": shape.linear_matrices, "*": shape.full_attention_matrices}
    if half in matrices:
        return _on_one(matrices[half], shape, t)
    routed = weights.routed * (half == "E")
    return shape.ffn_matrices * (weights.matrix + routed)


def expert_matrices(run: Run) -> int:
    """Count the copies of one matrix of the routed experts in their backward pass.

    All matrices gathered or cut out, and the gradients to which loops for further rounds add.
    """
    if run.shape.experts is None:
        return 0
    return run.shape.ffn_matrices * (2 if experts.round_loops(run) else 1)


def sharded_params(run: Run, weights: Weights, *, tables: bool = True) -> float:
    """Count the matrix parameters in one GPU's ZeRO shard: over (fsdp, cp, ep), experts (fsdp, cp)."""
    dense = weights.dense + weights.tables * tables
    if run.zero == 0:
        return dense + weights.experts
    return dense / run.shards + weights.experts / (run.mesh.fsdp * run.mesh.cp)


def frozen_in_fp8(run: Run, weights: Weights) -> float:
    """Count the parameters below adapters stored in fp8, gathered over ZeRO's axes: the layers' matrices, without
    experts and `model.mtp_layers`."""
    return run.frozen_in_fp8 * weights.dense * (1 - run.shape.mtp_layers / weights.layers)


def gathered_in_fp8(run: Run, weights: Weights) -> float:
    """Count the matrix parameters that zero 1 or 2 gathers once a step."""
    return frozen_in_fp8(run, weights) * (0 < run.zero < 3)


def resting_bytes(run: Run, trained: float, matrices: float) -> float:
    """Count the bytes of so many trained parameters between steps, which are float32 but for `matrices` of the layers,
    of which `optim.weight_dtype` says it."""
    return 4 * trained - (4 - run.weight_bytes) * matrices


def trained_params(run: Run, weights: Weights) -> float:
    """Count the matrix parameters with gradients that one GPU keeps: all, or the adapters'.

    ZeRO shards an adapter's side as wide as the model, and the tensor group the other, whose rank ZeRO shards if it
    divides it.
    """
    if not run.lora.enabled:
        return sharded_params(run, weights) + weights.padding / (run.shards if run.zero else 1)
    if len(run.kinds) > 1:
        return sum(share * trained_params(one, weights) for one, share in run.kinds)
    mlp, moe = stack_rows(run)
    shape, total, each = run.shape, 0.0, max(mlp + moe, weights.layers)
    rows = {"mlp": mlp, "moe": moe}
    rows |= {"full": each * shape.full_share, "linear": each * shape.linear_share}
    for side in adapter_sides(run.shape, run.lora):
        mesh, shards = (run.expert_mesh if side.is_routed else run.mesh), run.shards
        parts = mesh.tensor if side.by_tensor else 1
        if side.is_routed:
            parts, shards = parts * mesh.ep, mesh.fsdp * mesh.cp
        if run.zero and (side.by_model or run.lora.rank % shards == 0):
            parts *= shards
        total += rows[side.of] * side.num_params / parts
    return total
