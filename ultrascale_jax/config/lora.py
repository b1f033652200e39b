"""Low-rank adapters (LoRA, arXiv 2106.09685)."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from ultrascale_jax.config.section import NonNegative, Section, between

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Projections that can have an adapter, by the names of Hugging Face and PEFT."""

TARGETS: tuple[Target, ...] = get_args(Target)

MOST_RANK = 100_000


@dataclass(frozen=True, kw_only=True)
class Lora(Section, name="train.lora"):
    """Adapters of rank r: a projection with weight W computes x W + scale * (x A) B; A and B alone are trained.

    A run with adapters needs `train.init_from`.
    """

    rank: Annotated[int, between(0, MOST_RANK)] = 0
    """Columns of A and rows of B (r); 0: no adapters, all parameters are trained."""
    alpha: NonNegative = 0.0
    """Numerator of the scale; 0: twice the rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) and not alpha / r (rsLoRA, arXiv 2312.03732)."""
    targets: tuple[Target, ...] = TARGETS
    """Projections that have an adapter."""

    def __post_init__(self):
        super().__post_init__()
        self.require_switch("rank")
        self.require(len(self.targets) > 0, "targets", f"name some of {', '.join(TARGETS)}")
        ordered = tuple(target for target in TARGETS if target in self.targets)
        object.__setattr__(self, "targets", ordered)

    @property
    def enabled(self) -> bool:
        """Return whether adapters are trained, and nothing else."""
        return self.rank > 0

    @property
    def numerator(self) -> float:
        """Return alpha, or twice the rank."""
        return self.alpha or 2.0 * self.rank

    @property
    def scale(self) -> float:
        """Return the factor of the adapters' products."""
        return self.numerator / (self.rank**0.5 if self.rslora else self.rank)
