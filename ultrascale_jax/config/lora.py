"""Low-rank adapters (LoRA, arXiv 2106.09685): what `train.lora` says."""

import re
from dataclasses import dataclass

from ultrascale_jax.config.base import UserError, named_parts, require

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections that can have an adapter, by the names of Hugging Face and PEFT."""

FORM = "write rank=16, or more, as rank=16,alpha=32,scaling=rslora,targets=q_proj+v_proj"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters of rank r: a projection with weight W computes x W + scale * (x A) B; A and B alone are trained."""

    rank: int
    """Columns of A and rows of B (r)."""
    alpha: float
    """Numerator of the scale."""
    rank_stabilised: bool = False
    """Scale by alpha / sqrt(r) and not alpha / r (rsLoRA, arXiv 2312.03732)."""
    targets: tuple[str, ...] = TARGETS
    """Projections that have an adapter, in the order of `TARGETS`."""

    @property
    def scale(self) -> float:
        """Return the factor of the adapters' products."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)

    @classmethod
    def parse(cls, text: str) -> "Lora":
        """Read `rank=R[,alpha=A][,scaling=lora|rslora][,targets=NAME+NAME]`; alpha is 2 R unless given.

        Raises `UserError` for a text of another form.
        """
        given = named_parts("train.lora", text, ("rank", "alpha", "scaling", "targets"), FORM)
        require(
            re.fullmatch(r"[1-9]\d{0,4}", given.get("rank", "")) is not None,
            "train.lora",
            text,
            FORM,
        )
        rank, scaling = int(given["rank"]), given.get("scaling", "lora")
        try:
            alpha = float(given.get("alpha", 2 * rank))
        except ValueError:
            raise UserError(f"train.lora={text!r}: alpha must be a number") from None
        require(0 < alpha < 1e9, "train.lora", text, "alpha must be positive")
        require(scaling in ("lora", "rslora"), "train.lora", text, "scaling must be lora or rslora")
        names = given["targets"].split("+") if "targets" in given else list(TARGETS)
        fix = f"targets must be some of {', '.join(TARGETS)}, joined by +"
        require(set(names) <= set(TARGETS), "train.lora", text, fix)
        targets = tuple(name for name in TARGETS if name in names)
        return cls(rank=rank, alpha=alpha, rank_stabilised=scaling == "rslora", targets=targets)
