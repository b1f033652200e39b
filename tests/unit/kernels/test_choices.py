"""`auto` takes what a committed table has for the GPU."""

import dataclasses
import re

import pytest

from ultrascale_jax.config import KernelsConfig
from ultrascale_jax.kernels.choices import TABLE, AttentionCall, auto_order, is_hopper
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


DOCUMENTS = AttentionCall(
    kind="NVIDIA H100 80GB HBM3",
    dtype="bfloat16",
    queries=8192,
    keys=8192,
    head_dim=128,
    masked=True,
)


@pytest.mark.parametrize(
    ("change", "implementation", "chosen"),
    [
        ({}, "auto", "cudnn_packed"),
        ({}, "cudnn", "cudnn"),
        ({}, "mosaic", "mosaic"),
        ({"masked": False}, "auto", "cudnn"),
        ({"masked": False, "by_positions": True}, "cudnn_packed", "cudnn"),
        ({"by_positions": True}, "auto", "cudnn"),
        ({"window": True}, "auto", "cudnn"),
        ({"ragged": False}, "auto", "cudnn"),
        ({"queries": 1024, "keys": 1024}, "auto", "cudnn"),
        ({"kind": "NVIDIA A100-SXM4-80GB"}, "auto", "cudnn"),
        ({"queries": 8191, "keys": 8191}, "auto", "xla"),
        ({"queries": 4096}, "auto", "xla"),
        ({"dtype": "float32"}, "auto", "xla"),
        ({"head_dim": 100}, "auto", "xla"),
        ({"kind": "cpu", "on_gpu": False}, "auto", "xla"),
    ],
)
def test_attention_is_the_first_implementation_that_a_call_has_all_for(
    change, implementation, chosen
):
    call = dataclasses.replace(DOCUMENTS, **change)
    assert call.choose(implementation) == chosen
    assert call.packs(implementation) == (chosen == "cudnn_packed")


@pytest.mark.parametrize(
    ("change", "implementation", "need"),
    [
        ({"by_positions": True}, "cudnn_packed", "documents without positions of their own"),
        ({"window": True}, "cudnn_packed", "no window"),
        ({"kind": "NVIDIA A100-SXM4-80GB"}, "cudnn_packed", "an H100 or later"),
        ({"queries": 8191, "keys": 8191}, "cudnn", "an even length for a mask"),
        ({"kind": "NVIDIA B200"}, "mosaic", "an H100 or H200"),
        ({"head_dim": 96}, "mosaic", "a head dim of 64 or 128"),
        ({"softcap": True}, "mosaic", "no soft cap"),
    ],
)
def test_attention_that_is_asked_for_and_lacks_something_fails_loudly(change, implementation, need):
    call = dataclasses.replace(DOCUMENTS, **change)
    message = f"kernels.attention='{implementation}': needs {need}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}.*; got .*; use kernels.attention"):
        call.choose(implementation)
    assert need in call.lacking(implementation)
