"""How many parameters one GPU works on, and how many of them it keeps; no JAX."""

from dataclasses import dataclass

from ultrascale_jax.plan.workload import Run


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters of one pipeline stage on one GPU of its tensor group, whole over the axes of ZeRO."""

    dense: float
    """Matrices of its layers, without routed experts."""
    experts: float
    """Routed experts of its layers, which `ep` splits."""
    table: float
    """The embedding's table, or the head."""
    tables: float
    """Both; a tied one counts once."""
    vectors: float
    """Norms, whole on every GPU."""
    attention: float
    """Matrices of the attention of one layer."""
    matrix: float
    """One matrix of the feed-forward layer, or of all experts of a layer."""
    layers: float
    """Layers."""

    @property
    def blocks(self) -> float:
        """Matrices of its layers."""
        return self.dense + self.experts


def weights_of(run: Run) -> Weights:
    """The parameters that one GPU works on.

    Kv heads that the tensor group outnumbers are on all its GPUs. Every rank of a pipeline has as many layers as the
    fullest, and its part of the vocabulary.
    """
    shape, mesh = run.shape, run.mesh
    t, D, layers = mesh.tensor, shape.d_model, run.rank_layers
    kv_heads = shape.num_kv_heads / min(t, shape.num_kv_heads)
    attention = 2 * D * shape.head_dim * (shape.num_heads / t + kv_heads)
    matrix, moe, routed, shared = D * shape.d_ff / t, 0.0, 0.0, 0.0
    if shape.num_experts:
        moe = shape.moe_layers / shape.num_layers
        routed = shape.num_experts * shape.expert_params / (mesh.ep * t)
        shared = shape.shared_experts * shape.expert_params / t + D * shape.num_experts
        matrix = max(matrix if moe < 1 else 0.0, routed / shape.matrices)
    table = shape.vocab_size * D / (t * mesh.pp)
    head_norms = 2 * shape.head_dim if shape.qk_norm == "head" else 0
    return Weights(
        dense=layers * (attention + (1 - moe) * shape.mlp_params / t + moe * shared),
        experts=layers * moe * routed,
        table=table,
        tables=table if shape.tied_embeddings else 2 * table,
        vectors=layers * (2 * D + head_norms) + D,
        attention=attention,
        matrix=matrix,
        layers=layers,
    )


def rest(run: Run, weights: Weights, *, tables: bool = True) -> float:
    """Matrix parameters that one GPU keeps where ZeRO shards them: over (fsdp, cp, ep), experts over (fsdp, cp)."""
    dense = weights.dense + weights.tables * tables
    if run.zero == 0:
        return dense + weights.experts
    return dense / run.shards + weights.experts / (run.mesh.fsdp * run.mesh.cp)
