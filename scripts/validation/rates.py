"""Compare the rates of single operations with published measurements, and try rates that are fitted to them.

docs/planning/rates.csv has the measurements. The planner does not take the refitted rates: they would change every
simulated figure of the pages.
"""

from collections.abc import Mapping
from unittest import mock

from ultrascale_jax.plan.formulas import costs
from ultrascale_jax.plan.hardware import Gpu, find_gpu

PRODUCT_SHARE = {"bf16": 0.82, "fp8": 0.72, "fp32": 0.82}
"""Share of the peak of a product whose inputs are read while it multiplies; its result is written afterwards."""

BUSY = 0.86
"""Speed of an operation within a step over that alone: MaxText's and NeMo's bf16 runs without a pipeline are then as
far above their measurements (1.08) as below (0.93)."""

ATTENTION = {"forward": 0.65, "backward": 0.55}
"""Share of the peak that cuDNN's attention reaches alone: 8,192 tokens, causal."""


def gemm_seconds(
    gpu: Gpu, m: float, n: float, k: float, dtype: str = "bf16", batch: int = 1
) -> float:
    """Time products as `costs.gemm_seconds` does, by the refitted rates."""
    arithmetic = 2 * batch * m * n * k / (PRODUCT_SHARE[dtype] * costs.peak_flops(gpu, dtype))
    read, written = (costs.memory_seconds(gpu, 2 * batch * x) for x in (k * (m + n), m * n))
    return (max(arithmetic, read) + written) / BUSY + costs.LAUNCH_S


def refitted() -> mock._patch:
    """Return a context in which the formulas take the refitted rates."""
    attention = {name: BUSY * share for name, share in ATTENTION.items()}
    return mock.patch.multiple(costs, gemm_seconds=gemm_seconds, ATTENTION_SHARE=attention)


def tflops(row: Mapping[str, str]) -> float:
    """Return the TFLOP/s that the formulas give a measured operation within a step."""
    gpu = find_gpu(row["gpu"])
    if row["operation"] == "product":
        m, n, k = (float(row[name]) for name in "mnk")
        return 2 * m * n * k / costs.gemm_seconds(gpu, m, n, k, row["dtype"]) / 1e12
    backward, head_dim = "backward" in row["operation"], int(row["head_dim"])
    return 1 / costs.attention_seconds(gpu, 1e12, backward=backward, head_dim=head_dim)
