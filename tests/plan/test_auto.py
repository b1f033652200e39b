"""`choose_auto` takes the fastest by formula that fits, and says so in one line."""

import contextlib
import dataclasses
import json
import random
import re

import pytest

from tests.recipes import MEANT_FOR, left_open, pinned
from ultrascale_jax.cli import plan
from ultrascale_jax.cli.command_line import load_recipe
from ultrascale_jax.config import (
    AUTO,
    Keep,
    MeshConfig,
    PipelineConfig,
    UserError,
    remat_names,
    with_changes,
)
from ultrascale_jax.configs.deepseek_v3 import config as deepseek_v3
from ultrascale_jax.configs.llama3_8b import config as llama3_8b
from ultrascale_jax.configs.llama3_70b import config as llama3_70b
from ultrascale_jax.configs.llama32_1b import config as llama32_1b
from ultrascale_jax.configs.mixtral_8x7b import config as mixtral
from ultrascale_jax.plan.auto import Host, check_host, choose_auto, cluster_of
from ultrascale_jax.plan.formulas import costs
from ultrascale_jax.plan.formulas.memory import breakdown, host_bytes, verdict
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster, find_gpu
from ultrascale_jax.plan.search.ranking import EQUAL, Search
from ultrascale_jax.plan.search.search_space import OFFLOADED, POLICIES, divisors
from ultrascale_jax.plan.verdict import FITS, LIKELY, SURE, UNSURE
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.units import GIB


def h100s(num_gpus, usable_gib=None, host=None):
    usable = None if usable_gib is None else int(usable_gib * GIB)
    return cluster_of("NVIDIA H100 80GB HBM3", num_gpus, usable, host)


NO_HOST = Host(usable_bytes=0)


WITHOUT_HOST = [remat for remat in POLICIES if remat not in OFFLOADED]


@pytest.mark.parametrize(
    ("name", "num_gpus"), [(name, n) for name, (_, counts) in MEANT_FOR.items() for n in counts]
)
def test_the_plain_command_of_a_recipe_fits_the_gpus_that_it_is_meant_for(name, num_gpus):
    memory_gib = MEANT_FOR[name][0]
    cluster = h100s(num_gpus, memory_gib and 0.92 * memory_gib)
    cfg, _ = choose_auto(load_recipe(name), cluster)
    run = Run.of(cfg, num_gpus)
    assert not cfg.train.auto
    assert breakdown(run).peak_bytes <= SURE * cluster.gpu.usable_bytes


@pytest.mark.parametrize(
    ("name", "global_batch"),
    # All of the small one fits, and what `none` writes and reads takes longer than what `selective` repeats.
    [("llama3_8b", 512), ("llama32_1b", 16)],
)
def test_it_is_the_fastest_by_formula_of_all_that_fit(name, global_batch):
    cluster, found = h100s(8), {}
    recipe = load_recipe(name)
    cfg = with_changes(recipe, mesh=recipe.mesh, global_batch=global_batch)
    for remat in POLICIES:
        for count in divisors(global_batch // 8):
            run = Run.of(pinned(cfg, remat, count), 8)
            if verdict(run, cluster.gpu) == FITS:
                found[remat, count] = estimate(run, cluster).step_s
    chosen, _ = choose_auto(left_open(cfg), cluster)
    assert len(found) > 4
    fastest = min(found.values())
    simple = {key: step_s for key, step_s in found.items() if not remat_names(key[0])[1]}
    if min(simple.values()) <= EQUAL * fastest:
        found = simple
    assert (chosen.train.remat, chosen.train.microbatches) == min(found, key=found.__getitem__)


def test_the_line_says_what_was_chosen_and_why():
    cfg, why = choose_auto(left_open(llama3_70b), h100s(512))
    step = estimate(Run.of(cfg, 512), h100s(512))
    assert why == (
        f"--train.remat {cfg.train.remat} --train.microbatches {cfg.train.microbatches} "
        f"({2 // cfg.train.microbatches} sequences a GPU at once): by formula the fastest that fits 512 x h100 of "
        f"20 tried, {step.step_s:.3g} s a step, {step.peak_bytes / GIB:.1f} of 72.8 GiB a GPU and "
        f"{step.host_bytes / GIB:.1f} of 192.0 GiB of its host, at 53.5 GB/s"
    )
    assert step.host_bytes > 0
    cfg, why = choose_auto(left_open(llama3_8b), h100s(8))
    assert cfg.train.microbatches == 64
    assert "(1 sequence a GPU at once): by formula the simplest within 2% of the fastest" in why
    assert why.endswith(" of 72.8 GiB a GPU") and "of 62 tried" in why
    assert "of 49 tried" in choose_auto(left_open(llama3_8b), h100s(8, host=NO_HOST))[1]


def test_activations_wait_in_the_host_where_its_memory_and_link_allow_it():
    names = {"remat": [], "step_s": []}
    links = (None, 20.0, 1.0)
    for host in (*(Host(usable_bytes=100 * GIB, gbs=gbs) for gbs in links), NO_HOST):
        cluster = h100s(512, host=host)
        cfg, _ = choose_auto(left_open(llama3_70b), cluster)
        step = estimate(Run.of(cfg, 512), cluster)
        assert step.verdict == FITS and step.host_bytes <= host.usable_bytes
        names["remat"].append(cfg.train.remat)
        names["step_s"].append(step.step_s)
    assert names["step_s"] == sorted(names["step_s"])
    assert {"gate", "up"} <= {*names["remat"][0].offloaded}
    assert names["remat"][2] == names["remat"][3] and not remat_names(names["remat"][3])[1]


def test_what_gains_less_than_the_formulas_err_is_not_offloaded():
    cluster = h100s(1)
    cfg, why = choose_auto(left_open(llama32_1b), cluster)
    assert not remat_names(cfg.train.remat)[1]
    assert "the simplest within 2% of the fastest that fits" in why


def test_a_host_that_is_too_small_for_what_is_offloaded_is_refused():
    remat = Keep(saved=("k", "v", "attn_core"), offloaded=("q", "attn_out", "gate", "up"))
    cfg = pinned(llama3_70b, remat, 1)
    need = host_bytes(Run.of(cfg, 512)) / GIB
    assert need == pytest.approx(90, abs=0.1)
    check_host(cfg, h100s(512))
    small = h100s(512, host=Host(usable_bytes=64 * GIB))
    message = (
        rf"^train\.remat={re.escape(str(remat))}: offloads {need:.1f} GiB of a GPU's activations, but of the host's "
        r"memory 64\.0 GiB are for one GPU; offload fewer names, take more train\.microbatches, or "
    )
    with pytest.raises(UserError, match=message):
        check_host(cfg, small)
    with pytest.raises(UserError, match=r"^train\.remat=.*: offloads .* are for one GPU"):
        choose_auto(pinned(llama3_70b, remat, AUTO), h100s(64, host=Host(usable_bytes=GIB)))
    # 1 sequence at once needs half of it.
    chosen, _ = choose_auto(pinned(llama3_70b, remat, AUTO), small)
    assert chosen.train.microbatches == 2


def test_what_has_a_value_keeps_it():
    for remat in ("full", Keep(saved=("q", "k", "v"))):
        cfg, why = choose_auto(pinned(llama3_8b, remat, AUTO), h100s(8))
        assert cfg.train.remat == remat and cfg.train.microbatches != AUTO
        assert "--train.remat" not in why and "--train.microbatches" in why
    cfg, why = choose_auto(pinned(llama3_8b, "auto", 64), h100s(8))
    assert cfg.train.microbatches == 64 and cfg.train.remat in POLICIES
    assert cfg == pinned(llama3_8b, cfg.train.remat, 64)


def test_where_nothing_is_open_nothing_is_chosen():
    cfg = pinned(llama3_8b)
    assert choose_auto(cfg, h100s(8)) == (cfg, "")


def test_the_mesh_is_chosen_too_if_asked():
    narrow = with_changes(left_open(llama3_70b), mesh=MeshConfig(fsdp=1, sp=8, dp=-1))
    given = choose_auto(left_open(llama3_70b), h100s(64))[0].check(64)
    cfg, why = choose_auto(narrow, h100s(64), choose_mesh=True)
    assert why.startswith(f"--mesh {cfg.mesh.text} --train.remat {cfg.train.remat} --train.micro")
    assert cfg.check(64) == cfg
    step, own = (estimate(Run.of(one, 64), h100s(64)) for one in (cfg, given))
    assert step.step_s <= EQUAL * own.step_s and step.peak_bytes <= SURE * step.gpu.usable_bytes
    fixed = {"remat": ("full",), "microbatches": (8,), "zero": (3,)}
    own = pinned(llama3_8b, "full", 8)
    pinned_cfg, why = choose_auto(own, h100s(16), choose_mesh=True, fixed=fixed)
    assert (pinned_cfg.train.remat, pinned_cfg.train.microbatches) == ("full", 8)
    assert "--train" not in why


def test_what_fits_nothing_is_refused_with_the_mesh_that_fits():
    cfg = with_changes(left_open(llama3_70b), mesh=MeshConfig(dp=8, fsdp=1, sp=8))
    with pytest.raises(UserError) as refusal:
        choose_auto(cfg, h100s(64))
    found = re.fullmatch(
        r"train\.remat='auto': nothing fits 64 x h100: dp8 sp8 .* full, the leanest, needs (\d+\.\d) of 72\.8 GiB a "
        r"GPU; take --mesh (\S+), or more GPUs",
        str(refusal.value),
    )
    assert found is not None and float(found[1]) > 72.8
    keep = {"zero": (3,), "schedule": ("1f1b",), "virtual_stages": (0,), "stash": ("residuals",)}
    other, _ = choose_auto(left_open(llama3_70b), h100s(64), choose_mesh=True, fixed=keep)
    assert found[2] == other.mesh.text
    with pytest.raises(UserError, match=r"^mesh='auto': nothing fits .*; take more GPUs, or a sma"):
        choose_auto(left_open(llama3_70b), h100s(8), choose_mesh=True)


def test_values_that_alone_stand_in_the_way_are_named_with_the_words_that_leave_them_open():
    """The defaults of `TrainConfig` are values too."""
    wide, short = MeshConfig(fsdp=1, dp=-1), {"choose_mesh": True}
    for remat, microbatches, mesh, asked, message in (
        (
            "none",
            1,
            MeshConfig(),
            short,
            r"^mesh='auto': nothing fits .* leanest, needs .*; give V",
        ),
        ("none", AUTO, MeshConfig(), {}, r"^train\.microbatches='auto': nothing fits .*; give V"),
        ("none", 1, wide, short, r"^mesh='auto': nothing fits .* leanest, needs .*; give V"),
        ("auto", 3, MeshConfig(), short, r"^mesh='auto': none is legal on 16 GPUs; give V"),
    ):
        cfg = with_changes(
            llama3_8b, mesh=mesh, remat=remat, microbatches=microbatches, global_batch=512
        )
        values = {"remat": (remat, "auto"), "microbatches": (microbatches, AUTO)}
        if asked:
            kept = {"remat": remat, "microbatches": microbatches}
            asked = asked | {"fixed": {n: (v,) for n, v in kept.items() if v not in ("auto", AUTO)}}
        with pytest.raises(UserError, match=message.removesuffix("V")) as refusal:
            choose_auto(cfg, h100s(16), **asked)
        words = str(refusal.value).partition("give ")[2]
        named = re.findall(r"train\.(\w+)=(\S+) in place of ('?\w+'?)", words)
        assert named and "more GPUs" not in words
        assert all(
            (repr(values[n][1]), repr(values[n][0])) == (free, now) for n, free, now in named
        )
        freed = {name: values[name][1] for name, *_ in named}
        if asked:
            asked["fixed"] = {n: v for n, v in asked["fixed"].items() if n not in freed}
        assert choose_auto(with_changes(cfg, mesh=mesh, **freed), h100s(16), **asked)[1]


def test_a_plan_of_what_does_not_fit_needs_the_least_memory():
    cfg, why = choose_auto(left_open(llama3_70b), h100s(8, host=NO_HOST), must_fit=False)
    peak = breakdown(Run.of(cfg, 8)).peak_bytes
    others = [pinned(llama3_70b, r, m) for r in WITHOUT_HOST for m in divisors(128)]
    assert peak == min(breakdown(Run.of(other, 8)).peak_bytes for other in others)
    # Eight numbers of micro-batches with full recomputation: the state is too large for any other.
    assert f"by formula nothing fits 8 x h100, the leanest of 8 tried, {peak / GIB:.1f} of" in why


def questions(count: int) -> list[tuple[str, list[str]]]:
    """Return recipes, and options of `plan`, by a fixed seed."""
    draw = random.Random(43)
    asked = []
    for _ in range(count):
        name = draw.choice(["llama32_1b", "llama3_8b", "qwen3_8b", "smollm2_135m", "qwen3_30b_a3b"])
        options = [
            "--gpus",
            str(draw.choice([2, 4, 8])),
            "--gpu",
            draw.choice(["h100", "a100", "h200", "h20", "l4"]),
        ]
        options += ["--train.global-batch", str(draw.choice([4, 8]))]
        options += ["--data.seq-len", str(draw.choice([2048, 4096, 16384]))]
        options += draw.choice([[], ["--train.remat", "full"], ["--train.zero", "3"]])
        asked.append((name, options))
    return asked


def check_that_verbs_agree(name: str, options: list[str], capsys) -> None:
    """Compare the mesh, the verdict and the time of `--mesh auto` with those of a search."""
    plan.main(["memory", name, *options, "--mesh", "auto", "--json"])
    told = capsys.readouterr()
    memory = json.loads(told.out)
    with contextlib.suppress(SystemExit):  # nothing fits
        plan.main(["search", name, *options, "--compile", "0", "--top", "1", "--json"])
    search = json.loads(capsys.readouterr().out)
    best = next((row for row in search["rows"] if row["why"].startswith("best")), None)
    if best is None:
        assert memory["verdict"] == "does not fit" and search["answer"].startswith("nothing fits")
        return
    assert memory["verdict"] == best["verdict"], (memory["label"], best["label"])
    assert memory["step_s"] == pytest.approx(best["step_s"], rel=0.02)
    faster = r"; faster but unsure, (\d+%) of the memory by formula: (.*), (\S+) s a step; "
    assert re.findall(faster, told.err) == re.findall(faster, search["answer"])


@pytest.mark.parametrize(("name", "options"), questions(20))
def test_mesh_auto_is_what_a_search_recommends(name, options, capsys):
    check_that_verbs_agree(name, options, capsys)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "options"), questions(50)[20:])
def test_mesh_auto_is_what_a_search_recommends_for_more_questions(name, options, capsys):
    check_that_verbs_agree(name, options, capsys)


def test_a_faster_mesh_that_may_fit_is_named_and_a_compilation_settles_it(capsys):
    """At 70.9 of 72.8 GiB by formula; its program takes 70.8 + 1.0 and fits."""
    fixed = {"pp": (1, 2), "dp": (1,), "cp": (1,), "schedule": ("1f1b", "interleaved")}
    cluster = h100s(8)
    cfg, why = choose_auto(load_recipe("qwen3_30b_a3b"), cluster, choose_mesh=True, fixed=fixed)
    assert verdict(Run.of(cfg, 8), cluster.gpu) == FITS
    found = re.search(
        r"; faster but unsure, (\d+)% of the memory by formula: (--mesh pp=2,ep=4 .*), (\S+) s a step; "
        r"`plan compile` with these options settles it$",
        why,
    )
    assert found is not None and float(found[1]) < 100 * LIKELY
    search = Search(load_recipe("qwen3_30b_a3b"), cluster, fixed)
    search.predict()
    assert search.winner is not None and search.doubt(search.winner) in why
    other = search.faster(search.winner)
    assert other is not None and f"{other.formula.step_s:.3g}" == found[3]
    assert estimate(Run.of(cfg, 8), cluster).step_s > 2 * other.formula.step_s
    words = ["qwen3_30b_a3b", "--gpus", "8", *found[2].split(), "--json"]
    plan.main(["memory", *words])
    told = json.loads(capsys.readouterr().out)
    assert (told["verdict"], told["step_s"]) == ("unsure", pytest.approx(other.formula.step_s))


def test_the_faster_of_those_that_probably_fit_is_named_before_one_that_hardly_does():
    cluster = h100s(8)
    search = Search(
        load_recipe("qwen3_30b_a3b"),
        cluster,
        {"pp": (2,), "schedule": ("interleaved",), "virtual_stages": (4,), "zero": (2,)},
    )
    search.predict()
    best = search.winner
    assert best is not None and best.verdict == FITS
    named = search.faster(best)
    unsure = [c for c in search.ranking if c.verdict == UNSURE]
    likely = [c for c in unsure if c.best.peak_bytes <= LIKELY * cluster.gpu.usable_bytes]
    assert named is not None and named.best.step_s == min(c.best.step_s for c in likely)
    assert named.best.step_s > min(c.best.step_s for c in unsure)


def test_where_all_that_fit_are_close_to_the_limit_the_leanest_is_taken():
    lean = pinned(llama3_8b, "full", 64)
    peak_gib = breakdown(Run.of(lean, 8)).peak_bytes / GIB
    cfg, why = choose_auto(left_open(llama3_8b), h100s(8, peak_gib / 0.97, NO_HOST))
    assert (
        cfg == lean
        and "unsure whether it fits 8 x h100, the fastest of the leanest of 49 tried" in why
    )


def test_experts_in_a_pipeline_keep_what_fits():
    cluster = h100s(2048)
    cfg, _ = choose_auto(left_open(deepseek_v3), cluster)
    assert breakdown(Run.of(cfg, 2048)).peak_bytes <= SURE * cluster.gpu.usable_bytes
    assert cfg.train.remat == Keep(saved=("attn_out", "gate"))
    lean = breakdown(Run.of(pinned(deepseek_v3, "full", 60), 2048)).peak_bytes
    tight = h100s(2048, lean / GIB / 0.97)
    assert "unsure whether it fits" in choose_auto(left_open(deepseek_v3), tight)[1]


@pytest.mark.parametrize(
    ("schedule", "legal"),
    [
        ("1f1b", lambda m: m >= 4),
        ("interleaved", lambda m: m >= 4),
        ("dualpipe_v", lambda m: m >= 8),
    ],
)
def test_a_pipeline_gets_micro_batches_that_its_schedule_can_take(schedule, legal):
    cfg = with_changes(
        left_open(llama3_8b), mesh=MeshConfig(pp=4, fsdp=2), pp=PipelineConfig(schedule=schedule)
    )
    chosen, _ = choose_auto(cfg, h100s(8))
    assert legal(chosen.train.microbatches)
    assert chosen == dataclasses.replace(cfg, train=chosen.train)


def test_tokens_travel_to_experts_as_the_recipe_says():
    moe = dataclasses.replace(mixtral.moe, a2a_groups=2)
    cfg = with_changes(left_open(mixtral), mesh=MeshConfig(fsdp=8, ep=8), moe=moe)
    chosen, _ = choose_auto(cfg, h100s(64))
    assert chosen == dataclasses.replace(cfg, train=chosen.train)


@pytest.mark.parametrize(
    ("changes", "num_gpus", "message"),
    [
        ({"mesh": MeshConfig(fsdp=2)}, 3, "mesh='fsdp=2': the sizes multiply to 2"),
        ({"mesh": MeshConfig(fsdp=-1)}, 7, "model.d_model=4096: must be divisible by mesh.fsdp"),
        ({"mesh": MeshConfig(fsdp=1, sp=-1)}, 3, "model.num_heads=32: must be divisible"),
        (
            {"mesh": MeshConfig(pp=8, fsdp=1), "pp": PipelineConfig(schedule="dualpipe_v")},
            8,
            "train.microbatches=8: dualpipe_v wants at least 2*mesh.pp=16",
        ),
    ],
)
def test_what_no_choice_makes_legal_is_refused_as_the_trainer_refuses_it(
    changes, num_gpus, message
):
    batch = {"global_batch": 8} if "pp" in changes else {}
    cfg = with_changes(left_open(llama3_8b), **changes, **batch)
    with pytest.raises(UserError) as refusal:
        choose_auto(cfg, h100s(num_gpus))
    assert str(refusal.value).startswith(message)


def test_known_gpus_are_planned_as_what_they_are_and_others_as_h100s():
    assert cluster_of("NVIDIA H200", 16) == find_cluster(None, "h200", 16)
    h100 = find_cluster(None, "h100", 8)
    named = dataclasses.replace(h100.gpu, name="cpu (planned as h100)")
    assert cluster_of("cpu", 8) == dataclasses.replace(h100, gpu=named)
    host = cluster_of("NVIDIA H200", 16, host=Host(usable_bytes=90 * GIB, gbs=40.0)).gpu
    assert (host.usable_host_bytes, costs.host_seconds(host, 40e9)) == (90 * GIB, pytest.approx(1))
    other = cluster_of("NVIDIA GeForce RTX 3090", 8, 22 * GIB)
    assert other.gpu.usable_bytes == 22 * GIB
    assert other.gpu.peak_flops() == find_gpu("h100").peak_flops()
