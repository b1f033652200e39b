"""`ultrascale plan memory`: what one GPU holds, from formulas."""

import json
import re
import shlex
import subprocess
import sys

import pytest

from ultrascale_jax.cli import plan
from ultrascale_jax.config import GPU_MEMORY_SHARE

LINKS = ["--cluster", "1x8,64,12"]
PINNED = ["--train.remat", "full", "--train.microbatches", "1"]
FITS = ["llama3_8b", "--gpus", "8", "--train.global-batch", "8", "--train.zero", "3", *PINNED]


def answer(capsys, *arguments: str) -> dict:
    plan.main(["memory", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def text(capsys, *arguments: str) -> str:
    plan.main(["memory", *arguments])
    return capsys.readouterr().out


def test_it_imports_neither_jax_nor_numpy():
    program = (
        "import sys; from ultrascale_jax.cli import plan; plan.main(sys.argv[1:]); "
        "sys.exit(any(name in sys.modules for name in ('jax', 'numpy', 'matplotlib')))"
    )
    command = [sys.executable, "-c", program, "memory", *FITS]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_parts_add_up_to_the_peak_and_the_timeline_reaches_it(capsys):
    found = answer(capsys, *FITS)
    assert (found["verb"], found["gpu"]) == ("memory", "h100")
    assert (found["gpus"], found["schema"]) == (8, 1)
    assert sum(found["parts"].values()) == pytest.approx(found["peak_bytes"], abs=1)
    assert max(size for _, size in found["timeline"]) == found["peak_bytes"]
    assert found["verdict"] == "fits"
    assert all(size >= 0 for size in found["parts"].values())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["llama3_8b", "--gpus", "8", *PINNED], "--train.microbatches"),
        (["llama3_70b", "--gpus", "32", "--train.zero", "1", *PINNED], "--train.zero 3"),
        ([*FITS, "--train.remat", "none", "--train.zero", "2"], "--train.remat"),
        (["llama32_1b", "--gpus", "8", "--mesh", "dp=8", "--gpu", "18,900,120", *LINKS], "--mesh"),
    ],
)
def test_the_hint_of_a_run_that_does_not_fit_is_options_with_which_it_does(
    arguments, expected, capsys
):
    found = answer(capsys, *arguments)
    assert found["verdict"] == "does not fit"
    lacking = (found["peak_bytes"] - found["usable_bytes"]) / 2**30
    hint = found["hints"][0]
    needed = f"{hint['peak_bytes'] / 2**30:.1f} GiB, {hint['step_s']:.3g} s a step"
    end = f"does not fit, {lacking:.1f} GiB short; try {hint['options']} ({needed})"
    assert end in text(capsys, *arguments)
    assert expected in hint["options"]
    changed = answer(capsys, *arguments, *shlex.split(hint["options"]))
    assert changed["verdict"] == hint["verdict"] == "fits"
    assert changed["peak_bytes"] == hint["peak_bytes"]
    assert changed["step_s"] == hint["step_s"]


def test_a_run_close_to_the_limit_is_unsure_and_the_hint_fits_for_certain(capsys):
    run = ["smollm2_135m", "--gpus", "1", "--train.global-batch", "8", "--train.microbatches", "2"]
    run += ["--train.remat", "none"]
    memory = answer(capsys, *run)["peak_bytes"] / GPU_MEMORY_SHARE / 2**30
    close = [*run, "--gpu", f"{0.98 * memory:.3f},900,120"]
    shown = text(capsys, *close)
    assert re.search(
        r"unsure, \d+\.\d MiB short by formula: `plan compile` settles it; fits for certain: ",
        shown,
    )
    assert answer(capsys, *close)["hints"][0]["verdict"] == "fits"


def test_a_checkpoint_its_host_and_the_bill_of_exactly_this_configuration(capsys):
    run = [*FITS, "--storage-gbs", "4"]
    found, shown = answer(capsys, *run), text(capsys, *run)
    assert found["checkpoint"]["total_bytes"] == 12 * 8_030_261_248
    assert found["checkpoint"]["write_s"] == pytest.approx(12 * 8.030261248 / 4)
    assert found["checkpoint"]["restore_bytes"] == dict(found["timeline"])["model init"]
    assert found["host"]["total_bytes"] == found["checkpoint"]["total_bytes"]
    assert "a checkpoint has 89.7 GiB; training waits 0.225 s until a GPU has copied" in shown
    assert "a host of 8 GPUs holds 89.7 GiB of a checkpoint that is being written, of 2" in shown
    assert found["bill"] is None and "the whole training" not in shown
    asked = [*run, "--tokens", "1T", "--price", "2", "--checkpoint.every", "50"]
    asked += ["--failure-hours", "51000", "--restart-s", "600"]
    bill = answer(capsys, *asked)["bill"]
    interruptions = bill["interruptions"]
    assert interruptions["interval_steps"] == 50
    days = 1e12 / 8 / found["tokens_per_s_gpu"] / 86400
    assert bill["days"] == pytest.approx(days / interruptions["goodput"])
    best = interruptions["best_interval_steps"]
    shown = text(capsys, *asked)
    assert "a save every 50 steps (" in shown and f"; {best:,} cost least): goodput" in shown


def test_adapters_say_what_a_base_in_four_bits_would_take(capsys):
    run = ["llama3_8b", "--gpus", "1", "--train.global-batch", "1", *PINNED]
    adapters = [*run, "--train.lora.rank", "16"]
    found = answer(capsys, *adapters)
    matrices = 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096
    saved = found["peak_bytes"] - found["quantized_peak_bytes"]
    assert saved == pytest.approx((2 - 4.127 / 8) * matrices, abs=2)
    size = f"{found['quantized_peak_bytes'] / 2**30:.1f} GiB"
    assert f"with QLoRA's base in 4.127 bits it would be {size}" in text(capsys, *adapters)
    assert answer(capsys, *run)["quantized_peak_bytes"] is None


def test_limits_are_told_with_commands_that_reach_them(capsys, tmp_path):
    run = ["smollm2_135m", "--gpu", "2,300,60", "--cluster", "1x4,64,12", "--gpus", "4"]
    run += ["--train.global-batch", "4", "--train.remat", "full", "--train.zero", "3"]
    run += ["--mesh", "fsdp=4", "--train.microbatches", "auto", "--explain", "limits"]
    found, shown = answer(capsys, *run), text(capsys, *run)
    rows = {row["question"]: row for row in found["limits"]["limits"]}
    sure, here, anywhere = (
        rows[f"{question} mesh"]
        for question in (
            "fewest GPUs on any",
            "longest sequence on this",
            "longest sequence on any",
        )
    )
    assert sure["gpus"] < 4 and here["gpus"] == anywhere["gpus"] == 4
    assert 2048 < here["seq_len"] <= 9 / 8 * anywhere["seq_len"]
    for row in (sure, here, anywhere):
        assert row["step"]["verdict"] == "fits" and row["command"] in shown
        words = shlex.split(row["command"])[2:]
        machine = ["--gpu", "2,300,60", "--cluster", f"1x{row['gpus']},64,12"]
        again = answer(capsys, *words, *machine, "--gpus", str(row["gpus"]))
        assert again["peak_bytes"] == row["step"]["peak_bytes"]
    held = ["--mesh", "sp=1,fsdp=-1", "--figure", str(tmp_path / "limits.png")]
    assert "fewest GPUs on this mesh" in text(capsys, *run, *held)
    assert (tmp_path / "limits.png").read_bytes()[:4] == b"\x89PNG"
    _, sure, *_, moved = answer(capsys, "llama3_8b", "--gpus", "1", "--explain", "limits")[
        "limits"
    ]["limits"]
    assert (sure["gpus"], moved["gpus"]) == (3, 2) and "--optim.offload both" in moved["command"]


def test_the_ranks_of_a_pipeline_use_what_they_keep_in_flight(capsys):
    """1F1B in lock step keeps 2 (p - r) micro-batches on rank r; all ranks have the buffers of the first."""
    run = ["llama3_8b", "--gpus", "8", "--train.global-batch", "32", "--train.microbatches", "16"]
    run += ["--mesh", "pp=4,fsdp=2", "--train.remat", "full", "--model.num-layers", "30"]
    found = answer(capsys, *run)
    ranks = found["ranks"]
    assert found["in_flight"] == 8 and "the activations of 8 micro-batches" in text(capsys, *run)
    assert [row["in_flight"] for row in ranks] == [8, 6, 4, 2]
    assert [row["layers"] for row in ranks] == [8, 8, 7, 7]
    kept = found["parts"]["activations: layer inputs"]
    for row, unused in zip(ranks, (0, 1 / 4, 1 / 2, 3 / 4), strict=True):
        assert row["used_bytes"] == pytest.approx(found["peak_bytes"] - unused * kept, abs=2)
    assert re.search(r"pipeline rank .* layers .* micro-batches at once", text(capsys, *run))
    many = [*run, "--train.global-batch", "256", "--train.microbatches", "128"]
    for schedule, chunks in (("afab", [128] * 4), ("1f1b", [8, 6, 4, 2])):
        every = answer(capsys, *many, "--pp.schedule", schedule)["ranks"]
        assert [row["in_flight"] for row in every] == chunks
    assert answer(capsys, *FITS)["ranks"] == []
