"""Measure how fast a run is and how much memory it takes."""

import math
import time

import jax
from jax.sharding import Mesh

from ultrascale_jax.config import Config
from ultrascale_jax.hooks import Hook, Row, Run
from ultrascale_jax.plan.flops import flops_per_token, mfu
from ultrascale_jax.plan.model_shape import adapter_params
from ultrascale_jax.plan.workload import reference_of
from ultrascale_jax.units import GIB


class Throughput(Hook):
    """Measures time, throughput and utilisation of steps; pauses between steps (evaluating, saving) do not count.

    Throughput is in tokens that pass through the model, counted in the loss or not: the FLOPs are the same.
    """

    def __init__(self, cfg: Config, mesh: Mesh):
        self._batches, self._seq_len = cfg.train.batches, cfg.data.seq_len
        adapters = adapter_params(cfg.model, cfg.train.lora, active=True)
        flops = flops_per_token(cfg.model, cfg.data.seq_len, adapters, reference=reference_of(cfg))
        self._flops = flops / mesh.size
        kind = mesh.devices.flat[0].device_kind
        # Utilization at one token a second.
        self._mfu = mfu(self._flops, kind, cfg.train.precision)
        self._steps: list[tuple[float, int]] = []
        """Seconds and tokens of each step."""
        self._begun = time.monotonic()

    def on_start(self, run: Run) -> None:
        run.summary |= {"compile_s": None, "first_step_s": None}

    def on_resume(self, run: Run) -> None:
        self._begun = time.monotonic()

    def on_metrics(self, run: Run, row: Row) -> None:
        begun, self._begun = self._begun, time.monotonic()
        tokens = self._batches.at(row["step"] - 1) * self._seq_len
        self._steps.append((self._begun - begun, tokens))
        row |= self._of(*self._steps[-1]) | {"hbm_gib": peak_memory_gib()}
        if len(self._steps) == 1:
            run.summary["first_step_s"] = self._begun - run.started

    def on_end(self, run: Run) -> None:
        # Without the first step, which warms up.
        steps = self._steps[1:]
        mean = [math.fsum(parts) / len(steps) for parts in zip(*steps, strict=True)]
        run.summary |= self._of(*mean)
        run.summary["hbm_gib"] = peak_memory_gib() or None

    def _of(self, step_s: float | None = None, tokens: float = 0.0) -> dict[str, float | None]:
        """Return the columns of steps of `step_s` seconds and so many tokens."""
        if step_s is None:
            return dict.fromkeys(("tokens_per_s", "step_s", "tflops_per_device", "mfu"))
        return {
            "tokens_per_s": tokens / step_s,
            "step_s": step_s,
            "tflops_per_device": self._flops * tokens / step_s / 1e12,
            "mfu": None if self._mfu is None else self._mfu * tokens / step_s,
        }


def peak_memory_gib() -> float:
    """Return the most memory used so far on this process's first device, in GiB; 0 if not known (CPU)."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use", 0) / GIB
