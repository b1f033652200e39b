"""How fast a run is: time, tokens and FLOPs of its steps."""

import math
import time

from jax.sharding import Mesh

from ultrascale_jax.config import Config
from ultrascale_jax.training.flops import flops_per_token, peak_tflops


class Rate:
    """Time, throughput and utilisation of steps; time spent between steps (evaluating, saving) does not count.

    Throughput is in tokens that pass through the model, counted in the loss or not: the FLOPs are the same.
    """

    def __init__(self, cfg: Config, mesh: Mesh):
        self._tokens = cfg.train.global_batch * cfg.data.seq_len
        self._tflops = (
            self._tokens * flops_per_token(cfg.model, cfg.data.seq_len) / mesh.size / 1e12
        )
        self._peak = peak_tflops(mesh.devices.flat[0].device_kind, cfg.train.precision)
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
        tflops = self._tflops / step_s
        mfu = None if self._peak is None else tflops / self._peak
        return {
            "tokens_per_s": self._tokens / step_s,
            "step_s": step_s,
            "tflops_per_device": tflops,
            "mfu": mfu,
        }
