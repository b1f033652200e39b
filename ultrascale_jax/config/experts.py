"""Exchange of tokens with their experts, and balance of the experts."""

from dataclasses import dataclass
from typing import Literal, get_args

from ultrascale_jax.config.base import check_choices, require, require_at_least
from ultrascale_jax.config.model import Experts

BIAS_RATE = 0.001
"""`moe.bias_rate` of a run that does not set it (DeepSeek-V3)."""


Dispatch = Literal["dropless", "capacity", "allgather"]


AuxOver = Literal["batch", "sequence"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Exchange of tokens with their experts over mesh.ep, and balance of the experts."""

    dispatch: Dispatch = "dropless"
    """All-to-alls in as many rounds as it takes, one that drops what is over `capacity_factor`, or all-gather."""
    capacity_factor: float = 1.25
    """Rows that a buffer holds, as a multiple of those that balanced routing would send."""
    a2a_groups: int = 1
    """Parts of mesh.ep, such as its nodes: a token goes once to each part that it needs, and is spread inside."""
    overlap: bool = False
    """Halve the batch: one half communicates while the experts work on the other."""
    aux_loss: tuple[float, AuxOver] = (0.0, "batch")
    """Weight of the balancing loss of each layer (Switch, arXiv 2101.03961, equation 4), and the tokens to balance: a
    micro-batch over all devices (batch), or each of its sequences (sequence, DeepSeek-V3)."""
    z_loss: float = 0.0
    """Weight of the squared log-sum-exp of the router's logits (ST-MoE, arXiv 2202.08906)."""
    bias_rate: float | None = None
    """Change of an expert's bias (`model.experts.bias`) in a step: up if the expert had less than the mean, down
    otherwise; 0.001 if it is not set."""

    def __post_init__(self):
        check_choices("moe", self)
        fix = "must be a weight, 0 or more, and batch or sequence"
        match self.aux_loss:
            case (int() | float() as weight, str() as over):
                sound = weight >= 0 and over in get_args(AuxOver)
            case _:
                sound = False
        require(sound, "moe.aux_loss", self.aux_loss, fix)
        require_at_least(1, "moe", self, ("capacity_factor", "a2a_groups"))
        require_at_least(0, "moe", self, ("z_loss", *["bias_rate"] * (self.bias_rate is not None)))
        fix = "allgather has no levels; use 1, or another dispatch"
        flat = self.a2a_groups == 1 or self.dispatch != "allgather"
        require(flat, "moe.a2a_groups", self.a2a_groups, fix)

    def check(self, experts: Experts, ep: int) -> None:
        """Refuse ranks that cannot share the experts, and a dispatch that is not for them."""
        fix = (
            "a dropped choice would keep its bias (model.experts.biases); use dropless or allgather"
        )
        sound = self.dispatch != "capacity" or not experts.biases
        require(sound, "moe.dispatch", self.dispatch, fix)
        fix = f"must divide model.experts.num={experts.num}"
        require(experts.num % ep == 0, "mesh.ep", ep, fix)
        fix = f"must divide mesh.ep={ep}"
        require(ep % self.a2a_groups == 0, "moe.a2a_groups", self.a2a_groups, fix)
