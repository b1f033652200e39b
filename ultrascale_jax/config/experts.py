"""Exchange of tokens with their experts, and balance of the experts."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from ultrascale_jax.config.base import require
from ultrascale_jax.config.mesh import MeshConfig
from ultrascale_jax.config.model import Experts
from ultrascale_jax.config.section import Count, NonNegative, Section, at_least

BIAS_RATE = 0.001
"""`moe.bias_rate` of a run that does not set it (DeepSeek-V3)."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig(Section, name="moe"):
    """Exchange of tokens with their experts, and balance of the experts."""

    capacity_factor: Annotated[float, at_least(1)] = 1.25
    """Rows that a buffer holds, as a multiple of the rows that balanced routing would send; more take further rounds.
    """
    a2a_groups: Count = 1
    """Parts of mesh.ep, with `folding` of mesh.ep*mesh.sp, such as its nodes: a token goes once to each part that it
    needs, and is spread inside."""
    folding: bool = False
    """Keep each expert whole on a rank of mesh.ep*mesh.sp, in place of splitting its hidden width over sp: MoE parallel
    folding (arXiv 2504.14960), Megatron's expert_tensor_parallel_size=1."""
    overlap: bool = False
    """Halve the batch: one half communicates while the experts work on the other."""
    aux_weight: NonNegative = 0.0
    """Weight of the balancing loss of each layer (Switch, arXiv 2101.03961, equation 4)."""
    aux_over: Literal["batch", "sequence"] = "batch"
    """Tokens to balance: a micro-batch over all devices, or each of its sequences (DeepSeek-V3)."""
    z_loss: NonNegative = 0.0
    """Weight of the squared log-sum-exp of the router's logits (ST-MoE, arXiv 2202.08906)."""
    bias_rate: NonNegative | None = None
    """Change of an expert's bias (`model.experts.bias`) in a step: up if the expert had less than the mean, down
    otherwise; 0.001 if it is not set."""

    def expert_mesh(self, mesh: MeshConfig) -> MeshConfig:
        """Return the mesh of the routed experts: with `folding` the ranks of sp are ranks of ep."""
        return replace(mesh, ep=mesh.ep * mesh.sp, sp=1) if self.folding else mesh

    @staticmethod
    def can_fold(experts: Experts, mesh: MeshConfig) -> bool:
        """Return whether `folding` places these experts elsewhere, and may."""
        return mesh.sp > 1 and mesh.tp == 1 and experts.num % (mesh.ep * mesh.sp) == 0

    def check_mesh(self, experts: Experts, mesh: MeshConfig) -> None:
        """Refuse a mesh whose ranks cannot share the experts."""
        fix = f"keeps experts whole, and mesh.tp={mesh.tp} splits each; use mesh.sp in its place, or no folding"
        self.require(mesh.tp == 1 or not self.folding, "folding", fix)
        self.check(experts, self.expert_mesh(mesh).ep)

    def check(self, experts: Experts, ranks: int) -> None:
        """Refuse ranks that cannot share the experts."""
        name = "mesh.ep*mesh.sp" if self.folding else "mesh.ep"
        require(
            experts.num % ranks == 0, name, ranks, f"must divide model.experts.num={experts.num}"
        )
        self.require(ranks % self.a2a_groups == 0, "a2a_groups", f"must divide {name}={ranks}")
