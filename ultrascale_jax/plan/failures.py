"""The interval between checkpoints that costs least where GPUs fail, and the goodput of a run with it.

A run stops when any of its GPUs fails, goes back to its last checkpoint and computes the lost steps again. Failures
come at random (exponential times between them). J. W. Young, "A first order approximation to the optimum checkpoint
interval", CACM 17 (1974), balances saves and lost work; J. T. Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", FGCS 22 (2006), adds failures while a run restarts or saves: his time of a whole run is

    M exp(R / M) (exp((interval + save) / M) - 1) work / interval

with M between failures of the run and R for a restart. `best_interval` solves its minimum instead of approximating it.
"""

import math
from dataclasses import dataclass

from ultrascale_jax.config import require

NEWTON = 8
"""Iterations of Newton's method, which doubles the digits of Young's first with each."""


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Failures of one run, and the costs of its checkpoints, in seconds."""

    mean_s: float
    """Mean time between failures of the run, whichever GPU it is that fails."""
    restart_s: float
    """From a failure until the run trains again."""
    save_s: float
    """Training waits so long for each save."""
    write_s: float = 0.0
    """A save is written for so long while training continues; a failure before its end goes back to the save before."""

    def __post_init__(self):
        require(self.mean_s > 0, "mean_s", self.mean_s, "must be above 0")
        for name in ("restart_s", "save_s", "write_s"):
            value = getattr(self, name)
            require(value >= 0, name, value, "must not be negative")

    @property
    def best_interval_s(self) -> float:
        """The seconds of training between saves at which the goodput is the largest; no shorter than a write.

        With x = interval / M and d = save / M the minimum of Daly's time solves 1 - x = exp(-(x + d)).
        """
        d = self.save_s / self.mean_s
        x = min(math.sqrt(2 * d), 1.0)  # Young
        for _ in range(NEWTON) if d > 0 else ():
            kept = -math.expm1(-(x + d))
            x += (kept - x) / kept
        return max(x * self.mean_s, self.write_s)

    def goodput(self, interval_s: float) -> float:
        """Return the share of time in which steps are computed that are kept, if a save follows each `interval_s`."""
        x, d = interval_s / self.mean_s, self.save_s / self.mean_s
        lost = (self.restart_s + self.write_s) / self.mean_s
        # x exp(-lost) / (exp(x + d) - 1), without a power that overflows
        return x * math.exp(-lost - x - d) / -math.expm1(-(x + d)) if x > 0 else 0.0
