"""The kernels that a run takes are checked before it takes its GPUs, and the check chooses none of them."""

import dataclasses
import functools
import re

import pytest

from tests import wrong_kernels
from ultrascale_jax.cli import command_line, kernel_check
from ultrascale_jax.cli.kernel_check import Part, faults, parts
from ultrascale_jax.launch.cluster import Launch
from ultrascale_jax.launch.events import Events, read_events
from ultrascale_jax.launch.procfs import gpu_kinds

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
CPU = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}


def check(folder, *kinds, limit_s=120.0):
    """Return the faults of kernels of these kinds, the lines, and the events."""
    lines = []
    wanted = [Part("norm", "mosaic", kind, (64, 128)) for kind in kinds]
    found = faults(
        wanted, H100, CPU, lines.append, Events(folder, 0),
        module=wrong_kernels.__name__, limit_s=limit_s,
    )  # fmt: skip
    return found, lines, read_events(folder)


def test_a_kernel_that_is_wrong_or_crashes_refuses_the_run(tmp_path):
    found, lines, events = check(
        tmp_path, "right", "wrong", "nan", "raises", "lacks_memory", "exits", "right"
    )
    error = r"relative error (nan|\d\.\de-\d\d), XLA's \d\.\de-\d\d"
    expected = [
        rf"right: {error}",
        rf"wrong: {error}",
        r"wrong: relative error nan, XLA's .*",
        "wrong: ValueError: no such tile",
        "unchecked: RuntimeError: RESOURCE_EXHAUSTED: Out of memory .*",
        "wrong: the check ended with code 3: .*",
        "unchecked: an earlier check did not end",
    ]
    assert lines[0] == f"kernels: checking 7 on a {H100}, for at most 120 s"
    for line, words in zip(lines[1:], expected, strict=True):
        assert re.fullmatch(rf"kernels\.norm=mosaic: \w+ \[64, 128\]: {words}", line)
    assert [next(iter(event["answer"])) for event in events] == [
        words.partition(":")[0] for words in expected
    ]
    assert {event["kind"] for event in events} == {"kernel_check"}
    assert [(name, value) for name, value, _ in found] == [("kernels.norm", "mosaic")] * 4
    assert found[0][2].startswith(f"wrong [64, 128] is wrong on a {H100} (relative error ")


def test_a_check_that_is_not_done_in_time_is_told_and_refuses_nothing(tmp_path):
    found, lines, _ = check(tmp_path, "hangs", limit_s=0.05)
    assert not found and lines[1].endswith("unchecked: the check was not done after 0.05 s")


def checked(arguments, devices, kind=H100):
    """The parts that a run on so many GPUs checks, by field."""
    cfg, _ = command_line.parse(arguments.split(), prog="train")
    return {part.field: part for part in parts(cfg.check(devices), kind)}, cfg


DENSE = (
    "llama3_8b --mesh fsdp=4,sp=2 --train.global-batch 16 --train.microbatches 2 --train.remat full"
)


def test_attention_is_checked_on_every_gpu_and_other_parts_where_a_kernel_of_ours_runs():
    (attention,) = checked(DENSE, 8)[0].values()
    options = {"documents": True, "sinks": False}
    assert attention == Part("attention", "auto", "plain", (4096, 8, 2, 128), options)
    assert list(checked(DENSE, 8, A100)[0]) == ["attention"]
    assert not checked(f"{DENSE} --kernels.attention xla", 8)[0]
    assert not checked(f"{DENSE} --train.precision fp32", 8)[0]
    assert checked(f"{DENSE} --train.precision fp16", 8)[0]["attention"].dtype == "float16"
    ours = checked(f"{DENSE} --kernels.norm mosaic --kernels.loss mosaic", 8)[0]
    assert ours["norm"] == Part("norm", "mosaic", "norm", (4096, 4096))
    assert ours["loss"].sizes == (4096, 4096, 128256 // 2)
    block = checked(f"{DENSE} --train.precision fp8_block", 8)[0]
    assert block["fp8_matmul"] == Part("fp8_matmul", "auto", "fp8_product", (4096, 7168, 4096))
    assert "fp8_matmul" not in checked(f"{DENSE} --train.precision fp8_block", 8, A100)[0]
    sparse = "mixtral_8x7b --mesh fsdp=2,ep=4 --train.global-batch 16 --train.microbatches 2 --train.remat full"
    experts = checked(f"{sparse} --kernels.grouped-matmul mosaic", 8)[0]["grouped_matmul"]
    assert experts.sizes == (8192, 2, 4096, 14336)


def test_on_the_cpu_nothing_is_checked(tmp_path):
    cfg, options = command_line.parse(["demo"], prog="train", options=command_line.JobOptions)
    kernel_check.check_run(cfg, options, None, pytest.fail, Events(tmp_path, 0))


def test_gpus_are_known_before_they_are_taken(tmp_path):
    assert gpu_kinds(tmp_path) == []
    for number in range(2):
        (tmp_path / f"0000:{number}").mkdir()
        text = f"Model: \t\t {H100}\nIRQ:   \t\t 18{number}\n"
        (tmp_path / f"0000:{number}/information").write_text(text)
    assert gpu_kinds(tmp_path) == [H100, H100]
    own = functools.partial(kernel_check.own_gpus, present=4)
    assert own(None, {}) == ["0", "1", "2", "3"]
    assert own(None, {"CUDA_VISIBLE_DEVICES": "2,GPU-ab"}) == ["2", "GPU-ab"]
    assert own(None, {"NVIDIA_VISIBLE_DEVICES": "5,6"}) == ["0", "1"]
    launch = Launch(method="slurm", local_device_ids=(1,))
    assert own(launch, {"CUDA_VISIBLE_DEVICES": "2,3"}) == ["3"]
    assert own(dataclasses.replace(launch, local_device_ids=None), {}) == ["0", "1", "2", "3"]


def test_windows_and_blocks_of_a_ring_are_checked_where_a_run_has_them():
    ring = "llama3_8b --mesh fsdp=2,cp=4 --train.global-batch 16 --train.microbatches 1 --train.remat full"
    assert checked(ring, 8)[0]["attention"].check == "ring_block"
    ulysses = checked(f"{ring} --cp.strategy ulysses", 8)[0]["attention"]
    assert (ulysses.check, ulysses.sizes) == ("plain", (4096, 8, 2, 128))
    window = checked(f"{DENSE} --model.sliding-window 1024", 8)[0]["attention"]
    assert window.options == {"window": 1024, "documents": True, "sinks": False}
