"""Days, energy and cost of a training at a predicted step, with its failures; no JAX."""

from dataclasses import dataclass

from ultrascale_jax.config import require
from ultrascale_jax.plan.failures import Failures
from ultrascale_jax.plan.formulas.checkpoint import checkpoint
from ultrascale_jax.plan.hardware import Gpu
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.units import rounded

LEAST_GOODPUT = 0.001
"""A run that keeps less of its time is refused."""


@dataclass(frozen=True, kw_only=True)
class FailureTerms:
    """How often GPUs fail, and the cost of it; what is none follows from the run."""

    gpu_hours: float
    """Hours between two failures of one GPU, with all else that stops a run counted as its failures."""
    restart_s: float
    save_s: float | None = None
    """Seconds for which training waits for a save; none: the time of the copy to the host."""
    interval_steps: int | None = None
    """Steps between saves; none: the number that costs least."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Tokens, price, power and failures of a training."""

    tokens: int
    """Tokens of the training."""
    price: float | None = None
    """USD of one GPU for one hour."""
    watts: float | None = None
    """Power of one GPU with its share of the host; none: NVIDIA's machine by 8, or the card's."""
    storage_gbs: float | None = None
    """1e9 bytes a second that all hosts together write of a checkpoint."""
    failures: FailureTerms | None = None


@dataclass(frozen=True, kw_only=True)
class Interruptions:
    """Saves and failures of a training."""

    save_s: float
    """Seconds for which training waits for a save."""
    between_s: float
    """Seconds between two failures of the run."""
    best_interval_steps: int
    """Steps between saves that cost least."""
    interval_steps: int
    """Steps between saves as they are counted: the requested number, or the best."""
    interval_s: float
    goodput: float
    """Share of the time in which steps are computed that are kept."""
    failures: float
    """Failures of the training."""

    @property
    def text(self) -> str:
        """All of it in a line."""
        best = self.best_interval_steps
        least = "which costs least" if best == self.interval_steps else f"{best:,} cost least"
        return (
            f"with a failure every {rounded(self.between_s / 3600)} h, {rounded(self.failures)} in all, and "
            f"{rounded(self.save_s)} s for a save every {self.interval_steps:,} steps "
            f"({rounded(self.interval_s / 60)} minutes; {least}): goodput {self.goodput:.2%}"
        )


@dataclass(frozen=True, kw_only=True)
class Bill:
    """Time, energy and cost of the training."""

    days: float
    """With saves and failures, where `interruptions` has them."""
    gpu_hours: float
    mwh: float | None
    """Energy in MWh; none where the power of the machine is not known."""
    usd: float | None
    """Cost; none without a price of this GPU."""
    usd_per_million_tokens: float | None
    interruptions: Interruptions | None
    """Saves and failures; none where it is not known how often GPUs fail."""

    @property
    def text(self) -> str:
        """All of it in a line."""
        parts = [f"{rounded(self.days)} days", f"{rounded(self.gpu_hours)} GPU hours"]
        parts += [] if self.mwh is None else [f"{rounded(self.mwh)} MWh"]
        if self.usd is not None and self.usd_per_million_tokens is not None:
            each = rounded(self.usd_per_million_tokens)
            parts.append(f"{rounded(self.usd)} USD, {each} a million tokens")
        failing = "" if self.interruptions is None else f"; {self.interruptions.text}"
        return f"{', '.join(parts)}{failing}"


def bill(step: StepPrediction, terms: Terms) -> Bill:
    """Price the training at this step's rate, with the failures of `terms`."""
    gpus = step.run.num_gpus
    seconds = terms.tokens / (step.tokens_per_s_gpu * gpus)
    stops = None
    if terms.failures is not None:
        stops = interruptions(step, terms, terms.failures, seconds)
        seconds /= stops.goodput
    hours = seconds / 3600 * gpus
    watts = terms.watts or step.gpu.machine_watts or step.gpu.watts
    usd = None if terms.price is None else hours * terms.price
    return Bill(
        days=seconds / 86400,
        gpu_hours=hours,
        mwh=None if watts is None else hours * watts / 1e6,
        usd=usd,
        usd_per_million_tokens=None if usd is None else usd / terms.tokens * 1e6,
        interruptions=stops,
    )


def energy(gpu: Gpu, given_watts: float | None) -> str:
    """Say of which watts the energy is."""
    if given_watts:
        return f"Energy: {given_watts:,.4g} W a GPU, as given"
    if gpu.machine_watts:
        return f"Energy: {gpu.machine_watts:,.4g} W a GPU with its share of the host"
    if gpu.watts:
        return f"Energy: {gpu.watts:,.4g} W a GPU, the card alone; --watts counts a host too"
    return "Energy: the power of this GPU is not known; --watts gives it"


def interruptions(
    step: StepPrediction, terms: Terms, failures: FailureTerms, training_s: float
) -> Interruptions:
    """Choose the interval of saves, in whole steps, and count the costs of saves and failures in `training_s`.

    Raises `UserError` where failures leave nothing of the time.
    """
    saved = checkpoint(step.run, step.gpu, terms.storage_gbs)
    save_s = saved.copy_s if failures.save_s is None else failures.save_s
    between_s = 3600 * failures.gpu_hours / step.run.num_gpus
    failing = Failures(
        mean_s=between_s,
        restart_s=failures.restart_s,
        save_s=save_s,
        write_s=saved.write_s or 0.0,
    )
    fewest = max(1, int(failing.best_interval_s / step.step_s))
    best = max((fewest, fewest + 1), key=lambda steps: failing.goodput(steps * step.step_s))
    steps = failures.interval_steps or best
    goodput = failing.goodput(steps * step.step_s)
    fix = (
        f"{step.run.num_gpus:,} GPUs fail every {between_s:.3g} s then, and the training never ends"
    )
    require(goodput >= LEAST_GOODPUT, "failure_hours", failures.gpu_hours, fix)
    return Interruptions(
        save_s=save_s,
        between_s=between_s,
        best_interval_steps=best,
        interval_steps=steps,
        interval_s=steps * step.step_s,
        goodput=goodput,
        failures=training_s / goodput / between_s,
    )
