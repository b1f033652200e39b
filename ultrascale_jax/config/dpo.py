"""Direct preference optimisation (DPO, arXiv 2305.18290): what `train.dpo` says."""

from dataclasses import dataclass
from typing import Literal, get_args

from ultrascale_jax.config.base import UserError, named_parts, require

Kind = Literal["sigmoid", "ipo"]

NAMES = ("beta", "label_smoothing", "loss", "reference")

FORM = "write beta=0.1, or more, as beta=0.1,label_smoothing=0.1,loss=sigmoid,reference=initial"

SHORTEST_PAIR = 32
"""Tokens of the shortest pairs with which a row can be full."""


def most_pairs(seq_len: int) -> int:
    """Return how many preference pairs a row of `seq_len` tokens holds at most."""
    return max(1, seq_len // SHORTEST_PAIR)


@dataclass(frozen=True, kw_only=True)
class Dpo:
    """A loss on pairs of answers, of the margin by which the model prefers the chosen one more than its reference."""

    beta: float
    """Weight of the divergence from the reference; a reward is beta * log(policy / reference) of an answer."""
    label_smoothing: float = 0.0
    """Share of the pairs whose answers are taken to be the wrong way round."""
    loss: Kind = "sigmoid"
    """`sigmoid`: -log sigmoid(reward margin); `ipo` (arXiv 2310.12036): the square of what the margin of the mean
    log-ratios of a token lacks of 1 / (2 beta)."""
    has_reference: bool = True
    """Whether log-ratios are over the parameters with which the run begins, and not over 1."""

    @classmethod
    def parse(cls, text: str) -> "Dpo":
        """Read `beta=B[,label_smoothing=S][,loss=sigmoid|ipo][,reference=initial|none]`.

        Raises `UserError` for a text of another form.
        """
        given = named_parts("train.dpo", text, NAMES, FORM)
        require("beta" in given, "train.dpo", text, FORM)
        try:
            beta, smoothing = float(given["beta"]), float(given.get("label_smoothing", 0))
        except ValueError:
            fix = "beta and label_smoothing must be numbers"
            raise UserError(f"train.dpo={text!r}: {fix}") from None
        require(0 < beta < 1e9, "train.dpo", text, "beta must be positive")
        fix = "label_smoothing must be at least 0 and less than 0.5"
        require(0 <= smoothing < 0.5, "train.dpo", text, fix)
        loss, reference = given.get("loss", "sigmoid"), given.get("reference", "initial")
        require(loss in get_args(Kind), "train.dpo", text, "loss must be sigmoid or ipo")
        fix = "label_smoothing is for loss=sigmoid; leave it out"
        require(not smoothing or loss == "sigmoid", "train.dpo", text, fix)
        fix = "reference must be initial or none"
        require(reference in ("initial", "none"), "train.dpo", text, fix)
        return cls(
            beta=beta,
            label_smoothing=smoothing,
            loss=loss,  # pyrefly: ignore[bad-argument-type]
            has_reference=reference == "initial",
        )


def has_reference(dpo: str) -> bool:
    """Return whether a step of `train.dpo` runs a reference beside the model that is trained."""
    return bool(dpo) and Dpo.parse(dpo).has_reference
