"""Direct preference optimisation (DPO, arXiv 2305.18290)."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ultrascale_jax.config.section import NonNegative, Section, at_least, below

SHORTEST_PAIR = 32
"""Tokens of the shortest pairs with which a row can be full."""


def most_pairs(seq_len: int) -> int:
    """Return how many preference pairs a row of `seq_len` tokens holds at most."""
    return max(1, seq_len // SHORTEST_PAIR)


@dataclass(frozen=True, kw_only=True)
class Dpo(Section, name="train.dpo"):
    """A loss on pairs of answers, of the margin by which the model prefers the chosen one more than its reference.

    It needs `train.init_from`, and shards that `prepare-data --preferences` made.
    """

    beta: NonNegative = 0.0
    """Weight of the divergence from the reference; a reward is beta * log(policy / reference) of an answer. 0: no DPO,
    the loss is of the next token."""
    label_smoothing: Annotated[float, at_least(0), below(0.5)] = 0.0
    """Share of the pairs whose answers are taken to be the wrong way round."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: -log sigmoid(reward margin); `ipo` (arXiv 2310.12036): (mean log-ratio margin - 1/(2 beta))^2, means
    over the tokens of an answer."""
    reference: Literal["initial", "none"] = "initial"
    """Model over which log-ratios are: the one with which the run begins, or none, which is 1."""

    def __post_init__(self):
        super().__post_init__()
        self.require_switch("beta")
        if self.label_smoothing and self.loss != "sigmoid":
            self.refuse("label_smoothing", "is for train.dpo.loss=sigmoid; use 0")

    @property
    def enabled(self) -> bool:
        """Return whether a run learns from preference pairs."""
        return self.beta > 0

    @property
    def has_reference(self) -> bool:
        """Return whether a step runs a reference too."""
        return self.enabled and self.reference == "initial"
