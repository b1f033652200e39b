"""`ultrascale plan`: each verb once in this process, its JSON, its table and its picture."""

import dataclasses
import json
import re
import shlex

import jax
import numpy as np
import pytest

from tests.plan_questions import check, questions
from ultrascale_jax.cli import command_line, plan
from ultrascale_jax.cli.plan_commands import search
from ultrascale_jax.cli.plan_commands.words import words
from ultrascale_jax.config import AXES, GPU_MEMORY_SHARE, SCHEDULES, MeshConfig
from ultrascale_jax.configs.shapes import LLAMA3_8B
from ultrascale_jax.parallel.pipeline import schedules
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.model_shape import ModelShape
from ultrascale_jax.plan.schedules.text import as_text
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.sharding.mesh import make_mesh


def answer(capsys, *arguments: str) -> dict:
    plan.main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def text(capsys, *arguments: str) -> str:
    plan.main([*arguments])
    return capsys.readouterr().out


def test_guide_search_and_memory_agree(capsys):
    verdicts = {check(capsys, *asked) for asked in questions(4)}
    assert {"fits", "does not fit"} <= verdicts


PICTURES = {
    "memory debug --gpus 8 --explain limits --mesh fsdp=8 --train.microbatches 1": "farthest that",
    "memory llama3_8b --gpus 8 --train.remat full --explain roofline": "295 FLOP/byte",
    "memory llama3_70b --gpus 64 --mesh pp=2,fsdp=2,cp=2,sp=8 --train.microbatches 8"
    " --train.remat full --explain mesh": "0, 1, ..., 7",
    "schedule --ranks 2 --microbatches 4 --runtime dependencies": "dualpipe_v",
    "schedule zb_v --ranks 2 --microbatches 4": "lock step",
}


@pytest.mark.parametrize(("command", "shows"), PICTURES.items())
def test_a_table_has_a_picture(command, shows, capsys, tmp_path):
    path = tmp_path / "picture.png"
    shown = text(capsys, *command.split(), "--figure", str(path))
    assert shows in shown and shown.endswith(f"wrote {path}\n")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# `plan memory`


PINNED = ["--train.remat", "full", "--train.microbatches", "1"]
EIGHT = ["memory", "llama3_8b", "--gpus", "8"]
FITS = [*EIGHT, "--train.global-batch", "8", "--train.zero", "3", *PINNED]
SMALL = "memory llama32_1b --gpus 8 --mesh dp=8 --gpu 18,900,120 --cluster 1x8,64,12".split()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([*EIGHT, *PINNED], "--train.microbatches"),
        (["memory", "llama3_70b", "--gpus", "32", "--train.zero", "1", *PINNED], "--train.zero 3"),
        ([*FITS, "--train.remat", "none", "--train.zero", "2"], "--train.remat"),
        (SMALL, "--mesh"),
    ],
)
def test_the_hint_of_a_run_that_does_not_fit_is_options_with_which_it_does(
    arguments, expected, capsys
):
    told = answer(capsys, *arguments)
    assert told["verdict"] == "does not fit"
    lacking = (told["peak_bytes"] - told["usable_bytes"]) / 2**30
    hint = told["hints"][0]
    needed = f"{hint['peak_bytes'] / 2**30:.1f} GiB, {hint['step_s']:.3g} s a step"
    end = f"does not fit, {lacking:.1f} GiB short; try {hint['options']} ({needed})"
    assert end in text(capsys, *arguments)
    assert expected in hint["options"]
    changed = answer(capsys, *arguments, *shlex.split(hint["options"]))
    for name in ("verdict", "peak_bytes", "step_s"):
        assert changed[name] == hint[name]
    assert changed["verdict"] == "fits"


def test_a_run_close_to_the_limit_is_unsure_and_the_hint_fits_for_certain(capsys):
    run = "memory smollm2_135m --gpus 1 --train.global-batch 8 --train.microbatches 2".split()
    run += ["--train.remat", "none"]
    memory = answer(capsys, *run)["peak_bytes"] / GPU_MEMORY_SHARE / 2**30
    close = [*run, "--gpu", f"{0.98 * memory:.3f},900,120"]
    unsure = r"unsure, \d+\.\d MiB short by formula: `plan compile` settles it; fits for certain: "
    assert re.search(unsure, text(capsys, *close))
    assert answer(capsys, *close)["hints"][0]["verdict"] == "fits"


def test_parts_a_checkpoint_and_a_bill_of_exactly_this_configuration(capsys):
    run = [*FITS, "--storage-gbs", "4"]
    told, shown = answer(capsys, *run), text(capsys, *run)
    assert (told["verb"], told["gpu"], told["gpus"], told["schema"]) == ("memory", "h100", 8, 1)
    assert sum(told["parts"].values()) == pytest.approx(told["peak_bytes"], abs=1)
    assert max(size for _, size in told["timeline"]) == told["peak_bytes"]
    assert told["checkpoint"]["restore_bytes"] == dict(told["timeline"])["model init"]
    assert "a checkpoint has 89.7 GiB; training waits 0.225 s until a GPU has copied" in shown
    assert "a host of 8 GPUs holds 89.7 GiB of a checkpoint that is being written, of 2" in shown
    assert told["bill"] is None and "the whole training" not in shown
    asked = [*run, "--tokens", "1T", "--price", "2", "--checkpoint.every", "50"]
    asked += ["--failure-hours", "51000", "--restart-s", "600"]
    bill = answer(capsys, *asked)["bill"]
    days = 1e12 / 8 / told["tokens_per_s_gpu"] / 86400
    assert bill["days"] == pytest.approx(days / bill["interruptions"]["goodput"])
    best = bill["interruptions"]["best_interval_steps"]
    shown = text(capsys, *asked)
    assert "a save every 50 steps (" in shown and f"; {best:,} cost least): goodput" in shown


def test_adapters_say_what_a_base_in_four_bits_would_take(capsys):
    run = ["memory", "llama3_8b", "--gpus", "1", "--train.global-batch", "1", *PINNED]
    adapters = [*run, "--train.lora.rank", "16"]
    told = answer(capsys, *adapters)
    matrices = 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096
    saved = told["peak_bytes"] - told["quantized_peak_bytes"]
    assert saved == pytest.approx((2 - 4.127 / 8) * matrices, abs=2)
    size = f"{told['quantized_peak_bytes'] / 2**30:.1f} GiB"
    assert f"with QLoRA's base in 4.127 bits it would be {size}" in text(capsys, *adapters)
    assert answer(capsys, *run)["quantized_peak_bytes"] is None


def test_limits_are_told_with_commands_that_reach_them(capsys):
    run = ["memory", "smollm2_135m", "--gpu", "2,300,60", "--cluster", "1x4,64,12", "--gpus", "4"]
    run += ["--train.global-batch", "4", "--train.remat", "full", "--train.zero", "3"]
    run += ["--mesh", "fsdp=4", "--train.microbatches", "auto", "--explain", "limits"]
    rows = {row["question"]: row for row in answer(capsys, *run)["limits"]["limits"]}
    assert len(rows) == 3 and rows["fewest GPUs on any mesh"]["gpus"] < 4
    for row in rows.values():
        words = shlex.split(row["command"])[2:]
        machine = ["--gpu", "2,300,60", "--cluster", f"1x{row['gpus']},64,12"]
        reached = answer(capsys, "memory", *words, *machine, "--gpus", str(row["gpus"]))
        assert reached["peak_bytes"] == row["step"]["peak_bytes"]
        assert reached["verdict"] == row["step"]["verdict"] == "fits"
    assert "fewest GPUs on this mesh" in text(capsys, *run, "--mesh", "sp=1,fsdp=-1")
    told = answer(capsys, "memory", "llama3_8b", "--gpus", "1", "--explain", "limits")["limits"]
    _, sure, *_, moved = told["limits"]
    assert (sure["gpus"], moved["gpus"]) == (3, 2) and "--optim.offload both" in moved["command"]


def test_the_ranks_of_a_pipeline_use_what_they_keep_in_flight(capsys):
    """1F1B in lock step keeps 2 (p - r) micro-batches on rank r; all ranks have the buffers of the first."""
    run = [*EIGHT, "--train.global-batch", "32", "--train.microbatches", "16"]
    run += ["--mesh", "pp=4,fsdp=2", "--train.remat", "full", "--model.num-layers", "30"]
    told, shown = answer(capsys, *run), text(capsys, *run)
    assert told["in_flight"] == 8 and "the activations of 8 micro-batches" in shown
    ranks = [(row["in_flight"], row["layers"]) for row in told["ranks"]]
    assert ranks == [(8, 8), (6, 8), (4, 7), (2, 7)]
    kept = told["parts"]["activations: layer inputs"]
    for row, unused in zip(told["ranks"], (0, 1 / 4, 1 / 2, 3 / 4), strict=True):
        assert row["used_bytes"] == pytest.approx(told["peak_bytes"] - unused * kept, abs=2)
    assert re.search(r"pipeline rank .* layers .* micro-batches at once", shown)
    assert answer(capsys, *FITS)["ranks"] == []


def test_an_axis_joins_the_devices_that_the_trainer_puts_along_it(capsys):
    """`tests/programs/plan/test_placement.py` compares the bytes of each axis with compiled programs."""
    mesh = "pp=2,fsdp=2,sp=2"
    run = ["memory", "debug", "--gpus", "8", "--train.microbatches", "2", "--explain", "mesh"]
    axes = answer(capsys, *run, "--mesh", mesh)["mesh"]["axes"]
    devices = make_mesh(MeshConfig.parse(mesh), jax.devices()).devices
    ids = np.vectorize(lambda device: device.id)(devices)
    for row in axes:
        place = [slice(None) if axis == row["axis"] else 0 for axis in AXES]
        assert row["group"] == (ids[tuple(place)] - ids.min()).tolist()
    assert [row["axis"] for row in axes] == ["pp", "fsdp", "sp"]
    assert text(capsys, *run, "--gpus", "1", "--mesh", "pp=1").endswith(
        "mesh dp=1 on 1 node of 8\n"
    )


def test_links_are_those_of_the_groups(capsys):
    run = ["memory", "llama3_70b", "--gpus", "64", "--mesh", "pp=2,fsdp=2,cp=2,sp=8"]
    run += ["--train.microbatches", "8", "--train.remat", "full", "--explain", "mesh"]
    rows = {row["axis"]: row for row in answer(capsys, *run)["mesh"]["axes"]}
    links = {axis: (row["nodes"], row["gb_per_second"]) for axis, row in rows.items()}
    assert links == {"pp": (2, 50.0), "fsdp": (4, 50.0), "cp": (2, 50.0), "sp": (1, 450.0)}
    # ZeRO's shards are those of fsdp and cp together.
    assert rows["fsdp"]["group"] == [0, 8, 16, 24]
    assert rows["fsdp"]["splits"] == "batch, state by ZeRO-3 over fsdp*cp"


def test_the_roofline_has_a_products_parameters_and_flash_attention_no_square_of_the_tokens(capsys):
    def rows(tokens: int) -> dict[str, dict]:
        """The operations of a layer with 8,192 tokens in sequences of so many."""
        run = [*EIGHT, "--train.remat", "full", "--explain", "roofline"]
        run += ["--data.seq-len", str(tokens), "--train.microbatches", str(tokens // 128)]
        return {row["name"]: row for row in answer(capsys, *run)["roofline"]["operations"]}

    whole, half, shape = rows(8192), rows(4096), ModelShape.of(LLAMA3_8B)
    flops = sum(row["flops"] for row in whole.values() if row["kind"] == "product")
    assert flops == 2 * 8192 * (shape.attention_params + shape.mlp_params)
    down, d, f = whole["product: down"], shape.d_model, shape.d_ff
    assert down["moved_bytes"] == 2 * (8192 * f + f * d + 8192 * d)
    assert down["intensity"] == down["flops"] / down["moved_bytes"]
    flash, plain = "flash attention", "attention, scores in memory"
    states = 2 * 8192 * 128 * (2 * 32 + 2 * 8) + 4 * 8192 * 32
    assert whole[flash]["moved_bytes"] == half[flash]["moved_bytes"] == states
    scores = 2 * 4 * 32 * 8192 * 8192 // 2
    assert whole[plain]["moved_bytes"] - half[plain]["moved_bytes"] == scores
    assert whole[plain]["flops"] == 2 * whole[flash]["flops"]  # the other half is masked


# `plan guide` and `plan search`


def test_the_guide_has_the_memory_of_each_way_and_what_another_cluster_is_worth(capsys):
    run = ["llama3_8b", "--gpus", "8", "--train.global-batch", "8", "--data.seq-len", "4096"]
    told = answer(capsys, "guide", *run, "--tokens", "15T", "--price", "2.5")
    assert [row["verdict"] for row in told["fit"]] == ["does not fit"] * 2 + ["fits"] * 5
    for row in told["fit"][1:4:2]:
        work = ["--mesh", row["mesh"], "--train.zero", str(row["zero"])]
        work += ["--train.remat", row["remat"], "--train.microbatches", "1"]
        assert answer(capsys, "memory", *run, *work)["peak_bytes"] == row["peak_bytes"]
    best, *slower = told["throughput"]
    assert {row["way"] for row in slower} >= {"with matrices split", "with a pipeline"}
    assert all(row["step_s"] > best["step_s"] and "slower" in row["why"] for row in slower)
    clusters = {row["what"]: row for row in told["other_clusters"]}
    assert "0.5 x the network" not in clusters  # all in one node
    other, bill = clusters["h200 instead"], told["bill"]
    assert other["usd"] is None  # 2.5 USD is the price of an H100
    assert other["even_price"] * other["gpu_hours"] == pytest.approx(bill["usd"])
    assert clusters["b200 instead"]["days"] < other["days"] < bill["days"]
    shown = text(capsys, "guide", "debug", "--gpus", "2", "--tokens", "1.5M")
    for part in ("Step 1: fit", "Step 2: reach", "Step 3: maximise", "1.5 M tokens"):
        assert part in shown
    assert "ultrascale plan compile debug --mesh" in shown


FLAT = ["--fixed", "pp=1,cp=1,dp=1"]
ROW = {
    *("label", "mesh", "sequences", "microbatches", "zero", "remat", "schedule", "peak_bytes"),
    *("step_s", "tokens_per_s_gpu", "mfu", "source", "verdict", "why", "command"),
}


def test_a_search_says_how_the_best_is_trained_and_why_the_others_lost(capsys):
    run = ["search", "llama3_8b", "--gpus", "8", "--compile", "0", *FLAT]
    run += ["--global-batch-tokens", "1Mi", "--data.seq-len", "4096"]
    told = answer(capsys, *run)
    assert told["label"] == "llama3_8b on 8 h100" and told["complete"]
    assert all(set(row) >= ROW and row["source"] == "formula" for row in told["rows"])
    best = told["rows"][0]
    assert best["why"] == "best" and best["command"] == told["command"]
    program, *arguments = shlex.split(told["command"])
    assert (program, arguments[0]) == ("ultrascale", "train")
    cfg = command_line.parse(arguments[1:], prog="train")[0].check(8)
    assert {axis: size for axis, size in cfg.mesh.sizes.items() if size > 1} == best["mesh"]
    assert cfg.train.global_batch == 256 and cfg.data.seq_len == 4096
    work = (cfg.train.microbatches, cfg.train.zero, str(cfg.train.remat))
    assert work == (best["microbatches"], best["zero"], best["remat"])
    shown = text(capsys, *run, "--top", "4")
    assert " slower: " in shown and "does not fit: it needs" in shown
    assert shown.splitlines()[-1] == told["command"]


def test_if_nothing_fits_one_line_says_what_lacks(capsys):
    with pytest.raises(SystemExit, match="1"):
        plan.main(["search", "llama3_405b", "--gpus", "8", *FLAT])
    shown = capsys.readouterr().out
    assert "nothing fits: the closest" in shown and " GiB of the " in shown


def test_an_interrupted_search_shows_the_ranking_so_far_and_ends_with_130(capsys, monkeypatch):
    timed = []

    def evaluate(cfg):
        if timed:
            raise KeyboardInterrupt
        timed.append(cfg)
        formula = estimate(Run.of(cfg, 8), find_cluster(None, "h100", 8))
        return dataclasses.replace(formula, source="compiled", peak_bytes=2**30, step_s=3.0)

    monkeypatch.setattr(search, "compiler", lambda options: evaluate)
    with pytest.raises(SystemExit, match="130"):
        plan.main(["search", "llama3_8b", "--gpus", "8", *FLAT, "--compile", "5", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert not told["complete"] and told["rows"][0]["step_s"] == 3.0


@pytest.mark.parametrize(
    "arguments",
    [
        "llama3_70b --mesh fsdp=64,sp=8 --train.zero 2",
        "demo --model.tied-embeddings --data.no-document-mask --optim.betas 0.8 0.9",
        "llama32_1b --model.rope-scaling.factor 16.0 --model.sliding-window 64 --train.remat save:q,k",
        "qwen3_8b --mesh dp=1 --train.global-batch 7 --data.source text:/tmp/*.txt --log.run-dir out/x",
    ],
)
def test_the_words_of_a_configuration_make_it_again(arguments):
    cfg, options = command_line.parse(arguments.split(), prog="train")
    assert command_line.parse(words(options.recipe, cfg), prog="train")[0] == cfg
    assert options.recipe == arguments.split()[0]


# `plan schedule`; the numbers are those of tests/unit/parallel/test_schedules.py


def test_all_schedules_stand_side_by_side_and_one_that_does_not_exist_says_why(capsys):
    rows = {row["name"]: row for row in answer(capsys, "schedule")["schedules"]}
    assert tuple(rows) == SCHEDULES
    assert rows["interleaved"]["bubble"]["lockstep"] == 0.1875
    assert rows["zb_v"]["bubble"]["dependencies"] == pytest.approx(0.0625)
    assert rows["1f1b"]["in_flight"] == [8, 6, 4, 2]
    shown = text(capsys, "schedule")
    assert all(name in shown for name in SCHEDULES) and "18.8%" in shown
    few = ["schedule", "--microbatches", "3"]
    rows = {row["name"]: row for row in answer(capsys, *few)["schedules"]}
    assert rows["dualpipe_v"]["refused"].startswith("train.microbatches=3: ")
    assert "refused" not in rows["1f1b"]
    assert "must be at least 4" in text(capsys, *few)


def test_a_schedules_table_is_shown_written_and_read_again(tmp_path, capsys):
    path = tmp_path / "own.csv"
    made = ["schedule", "interleaved", "--ranks", "2", "--microbatches", "4", "--virtual", "2"]
    shown, table = text(capsys, *made, "--csv", str(path)), schedules.build("interleaved", 2, 4, 2)
    assert shown.startswith(as_text(table)) and f"--pp.schedule {path}" in shown
    assert "formula 12.5%, lock step 12.5%" in shown
    told, reread = answer(capsys, *made), answer(capsys, "schedule", str(path))
    assert told["ticks"] == len(told["table"]) == len(table.ticks)
    assert told["table"][0] == [{"F": [0, 0]}, {}]
    assert (reread["table"], reread["virtual"]) == (told["table"], 2)
