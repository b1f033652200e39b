"""`auto` takes what a committed table has for the GPU."""

import pytest

from ultrascale_jax.config import KernelsConfig
from ultrascale_jax.kernels.choices import TABLE, auto_order, is_hopper
from ultrascale_jax.plan.hardware import GPUS


@pytest.mark.parametrize("kind", [*(gpu.kind for gpu in GPUS.values()), "cpu", "a GPU of later"])
def test_every_field_has_a_row_for_every_gpu_that_ends_with_xlas(kind):
    for name in KernelsConfig().choices:
        order = auto_order(name.removeprefix("kernels."), kind)
        assert order[-1] == "xla" and ("mosaic" not in order or is_hopper(kind))


def test_what_was_never_measured_is_xlas_or_cudnns():
    ours = [row for row in TABLE if "mosaic" in row.order]
    assert [(row.field, row.order) for row in ours] == [("fp8_matmul", ("mosaic", "xla"))]
    assert all(row.evidence for row in TABLE)
