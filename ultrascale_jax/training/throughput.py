"""How fast a run is: time, tokens and FLOPs of its steps."""

import math
import time

from jax.sharding import Mesh

from ultrascale_jax.config import Config
from ultrascale_jax.training.flops import flops_per_token, mfu


class Rate:
    """Time, throughput and utilisation of steps; time spent between steps (evaluating, saving) does not count.

    Throughput is in tokens that pass through the model, counted in the loss or not: the FLOPs are the same.
    """

    def __init__(self, cfg: Config, mesh: Mesh):
        self._tokens = cfg.train.global_batch * cfg.data.seq_len
        self._flops = self._tokens * flops_per_token(cfg.model, cfg.data.seq_len) / mesh.size
        kind = mesh.devices.flat[0].device_kind
        # Of a step of one second.
        self._mfu = mfu(self._flops, kind, cfg.train.precision)
        self._times: list[float] = []
        self.restart()

    def restart(self) -> None:
        """The next step begins now."""
        self._begun = time.monotonic()

    def step(self) -> dict[str, float | None]:
        """The step that ends now, and the next one's beginning."""
        begun = self._begun
        self.restart()
        self._times.append(self._begun - begun)
        return self._of(self._times[-1])

    def mean(self) -> dict[str, float | None]:
        """All steps but the first, which warms up."""
        times = self._times[1:]
        return self._of(math.fsum(times) / len(times) if times else None)

    def _of(self, step_s: float | None) -> dict[str, float | None]:
        if step_s is None:
            return dict.fromkeys(("tokens_per_s", "step_s", "tflops_per_device", "mfu"))
        return {
            "tokens_per_s": self._tokens / step_s,
            "step_s": step_s,
            "tflops_per_device": self._flops / step_s / 1e12,
            "mfu": None if self._mfu is None else self._mfu / step_s,
        }
