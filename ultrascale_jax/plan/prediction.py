"""The prediction of one optimizer step: the type that formulas, compiled programs, search and JSON share."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ultrascale_jax.plan.hardware import Gpu
from ultrascale_jax.plan.verdict import DOES_NOT_FIT, Verdict, by_formula, by_program
from ultrascale_jax.plan.workload import Run

SCHEMA = 1
"""Version of the JSON that `ultrascale plan` prints; a field that is removed or changes its meaning increases it."""

BOUNDS = ("one_stream_s", "side_by_side_s", "contended_s")
"""Fields with the step's time under other assumptions about collectives; of a compiled program only."""


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """One step of `run`, as one GPU sees it."""

    run: Run
    gpu: Gpu
    source: Literal["formula", "compiled"]
    """The formulas, or the program that XLA compiled, replayed on `gpu`."""
    step_s: float
    """Seconds."""
    parts: Mapping[str, float]
    """Seconds by part; their sum is `step_s`."""
    peak_bytes: int
    """Most memory in use at any time."""
    host_bytes: int = 0
    """Activations and moments of one GPU in the host's memory."""
    gap_bytes: int = 0
    """Bytes between the buffers of XLA's arena, which it allocates at once; 0 by formula."""
    workspace_bytes: int = 0
    """Workspaces of libraries in addition, as far as they are known; 0 by formula."""
    one_stream_s: float | None = None
    """The step if all asynchronous collectives shared one stream; none by formula."""
    side_by_side_s: float | None = None
    """The step if collectives of different links never waited for each other; none by formula."""
    contended_s: float | None = None
    """The step if all work overlapped with a collective were `costs.CONTENTION` times as slow; none by formula."""

    @property
    def tokens_per_s_gpu(self) -> float:
        """Tokens that one GPU trains on in a second."""
        return self.run.step_tokens / self.step_s / self.run.num_gpus

    @property
    def tflops_per_s_gpu(self) -> float:
        """Model TFLOP that one GPU computes in a second."""
        return self.run.step_flops / self.step_s / self.run.num_gpus / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation as `plan/flops.py` counts it.

        Causal attention is halved, recomputation not counted; the peak is that of `run.precision`.
        """
        return self.run.mfu(self.step_s, self.gpu)

    @property
    def verdict(self) -> Verdict:
        """Whether the GPU has the memory, and the host the memory for offloaded tensors."""
        if not self.fits_host:
            return DOES_NOT_FIT
        if self.source == "compiled":
            return by_program(self.needed_bytes, self.gpu.usable_bytes)
        return by_formula(self.peak_bytes, self.gpu.usable_bytes)

    @property
    def needed_bytes(self) -> int:
        """Bytes that the step takes of the GPU: arguments, XLA's arena, and workspaces."""
        return self.peak_bytes + self.gap_bytes + self.workspace_bytes

    @property
    def may_fit(self) -> bool:
        """Whether it fits, or may."""
        return self.verdict != DOES_NOT_FIT

    @property
    def fits_host(self) -> bool:
        """Whether the host has the memory for offloaded tensors."""
        return self.host_bytes <= self.gpu.usable_host_bytes

    def scaled(self, factor: float) -> "StepPrediction":
        """Return the same step, `factor` times as long."""
        parts = {name: factor * seconds for name, seconds in self.parts.items()}
        return dataclasses.replace(self, step_s=factor * self.step_s, parts=parts)

    @classmethod
    def read(cls, values: Mapping[str, Any], run: Run, gpu: Gpu) -> "StepPrediction":
        """Return what `summary` returned of a compiled step of `run` on `gpu`."""
        sizes = ("peak_bytes", "host_bytes", "gap_bytes", "workspace_bytes")
        names = ("step_s", *sizes, *BOUNDS)
        same = {name: values[name] for name in names}
        return cls(run=run, gpu=gpu, source="compiled", parts=values["time_s"], **same)

    def summary(self) -> dict[str, Any]:
        """Return the numbers as JSON has them; bytes and seconds on one GPU."""
        return {
            "label": self.run.label,
            "gpus": self.run.num_gpus,
            "gpu": self.gpu.name,
            "source": self.source,
            "step_s": self.step_s,
            **{name: getattr(self, name) for name in BOUNDS},
            "time_s": dict(self.parts),
            "tokens_per_s_gpu": self.tokens_per_s_gpu,
            "tflops_per_s_gpu": self.tflops_per_s_gpu,
            "mfu": self.mfu,
            "peak_bytes": self.peak_bytes,
            "host_bytes": self.host_bytes,
            "gap_bytes": self.gap_bytes,
            "workspace_bytes": self.workspace_bytes,
            "needed_bytes": self.needed_bytes,
            "usable_bytes": self.gpu.usable_bytes,
            "usable_host_bytes": self.gpu.usable_host_bytes,
            "verdict": self.verdict,
        }
