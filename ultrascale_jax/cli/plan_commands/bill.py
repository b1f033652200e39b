"""Options that price a training: its tokens, price and power, storage, and failures."""

import math
from dataclasses import dataclass
from typing import Annotated

from ultrascale_jax.cli import command_line
from ultrascale_jax.cli.plan_commands import common
from ultrascale_jax.config import Config, require
from ultrascale_jax.config.section import Count, NonNegative, Positive
from ultrascale_jax.plan.bill import FailureTerms, Terms


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """Options of the verbs that tell the time of a run, and price its training."""

    document_tokens: Annotated[Count | None, command_line.option("N", "a whole row")] = None
    """Length of all packed documents, which no configuration tells."""
    tokens: Annotated[str | None, command_line.option("15T", "the recipe's")] = None
    """Tokens of the whole training; K, M, B and T are powers of 1,000, Ki and Mi of 1,024."""
    price: Annotated[Positive | None, command_line.option("USD")] = None
    """Price of one GPU for one hour."""
    watts: Annotated[Positive | None, command_line.option("W", "a DGX's by 8, or the card's")] = (
        None
    )
    """Power of one GPU with its share of the host and the cooling."""
    storage_gbs: Annotated[Positive | None, command_line.option("GB/S")] = None
    """1e9 bytes a second that all hosts together write of a checkpoint."""
    failure_hours: Annotated[Positive | None, command_line.option("H")] = None
    """Hours between two failures of one GPU, with all else that stops a run counted as its failures; a run of N GPUs
    fails N times as often. Saves follow at the interval that costs least, or at --checkpoint.every."""
    restart_s: Annotated[NonNegative | None, command_line.option("S")] = None
    """Seconds from a failure until the run trains again; --failure-hours needs it."""
    save_s: Annotated[
        NonNegative | None, command_line.option("S", "those of the copy to the host")
    ] = None
    """Seconds for which training waits for a save."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("restart_s", "save_s"):
            value = getattr(self, name)
            alone = value is not None and self.failure_hours is None
            require(not alone, name, value, "counts only with --failure-hours")
        complete = self.failure_hours is None or self.restart_s is not None
        require(complete, "failure_hours", self.failure_hours, "give --restart-s too")

    @property
    def asks_for_bill(self) -> bool:
        """Whether the command line has one of the options that only a bill needs."""
        return {"tokens", "price", "watts", "failure_hours"} & {*self.named} != set()


def terms(cfg: Config, options: Options) -> Terms:
    """Return the terms of the training of `cfg`; its batches give the number of tokens unless `options` do."""
    tokens = cfg.train.batches.before(cfg.train.steps) * cfg.data.seq_len
    if options.tokens is not None:
        tokens = common.tokens("tokens", options.tokens)
    failures = None
    if options.failure_hours is not None and options.restart_s is not None:
        interval = None
        if "checkpoint.every" in options.named:
            step_tokens = cfg.train.global_batch * cfg.data.seq_len
            interval = cfg.checkpoint.every or math.ceil(tokens / step_tokens)
        failures = FailureTerms(
            gpu_hours=options.failure_hours,
            restart_s=options.restart_s,
            save_s=options.save_s,
            interval_steps=interval,
        )
    return Terms(
        tokens=tokens,
        price=options.price,
        watts=options.watts,
        storage_gbs=options.storage_gbs,
        failures=failures,
    )
