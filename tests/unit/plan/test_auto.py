"""`choose_auto` takes the fastest by formula that fits, and says so in one line."""

import dataclasses
import re

import pytest

from tests.recipes import MEANT_FOR, left_open, pinned
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
from ultrascale_jax.plan.auto import Host, check_host, choose_auto, cluster_of
from ultrascale_jax.plan.formulas import costs
from ultrascale_jax.plan.formulas.memory import breakdown, host_bytes
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster, find_gpu
from ultrascale_jax.plan.search.ranking import EQUAL
from ultrascale_jax.plan.search.search_space import POLICIES, divisors
from ultrascale_jax.plan.verdict import FITS, LIKELY, SURE
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.units import GIB


def h100s(num_gpus, usable_gib=None, host=None):
    usable = None if usable_gib is None else int(usable_gib * GIB)
    return cluster_of("NVIDIA H100 80GB HBM3", num_gpus, usable, host)


NO_HOST = Host(usable_bytes=0)
FLAT = {"pp": (1,), "cp": (1,), "tp": (1,)}
"""Axes that a search leaves out, so that it takes a second."""


@pytest.mark.parametrize(
    ("name", "num_gpus"), [(name, n) for name, (_, counts) in MEANT_FOR.items() for n in counts]
)
def test_the_plain_command_of_a_recipe_fits_the_gpus_that_it_is_meant_for(name, num_gpus):
    memory_gib = MEANT_FOR[name][0]
    cluster = h100s(num_gpus, memory_gib and 0.92 * memory_gib)
    recipe = load_recipe(name)
    assert recipe.log.run_dir == f"out/{name}"
    cfg = choose_auto(recipe, cluster)[0].check(num_gpus)
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
            step = estimate(run, cluster)
            if step.verdict == FITS:
                found[remat, count] = step.step_s
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
    options = f"--train.remat {cfg.train.remat} --train.microbatches {cfg.train.microbatches} ("
    assert why.startswith(options) and "by formula the fastest that fits 512 x h100 of " in why
    for number in (f"{step.step_s:.3g} s a step", f"{step.peak_bytes / GIB:.1f} of 72.8 GiB a GPU"):
        assert number in why
    assert why.endswith(f"{step.host_bytes / GIB:.1f} of 192.0 GiB of its host, at 53.5 GB/s")
    assert choose_auto(cfg, h100s(512)) == (cfg, "")
    why = choose_auto(left_open(llama3_8b), h100s(8))[1]
    assert "(1 sequence a GPU at once): by formula the simplest within 2% of the fastest" in why


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


def test_the_mesh_is_chosen_too_if_asked():
    narrow = with_changes(left_open(llama3_70b), mesh=MeshConfig(fsdp=1, sp=8, dp=-1))
    kept = choose_auto(left_open(llama3_70b), h100s(64))[0].check(64)
    cfg, why = choose_auto(narrow, h100s(64), choose_mesh=True, fixed=FLAT)
    assert why.startswith(f"--mesh {cfg.mesh.text} --train.remat {cfg.train.remat} --train.micro")
    assert cfg.check(64) == cfg
    chosen, own_mesh = (estimate(Run.of(one, 64), h100s(64)) for one in (cfg, kept))
    assert chosen.step_s <= EQUAL * own_mesh.step_s and chosen.verdict == FITS
    fixed = FLAT | {"remat": ("full",), "microbatches": (8,), "zero": (3,)}
    cfg, why = choose_auto(pinned(llama3_8b, "full", 8), h100s(16), choose_mesh=True, fixed=fixed)
    assert (cfg.train.remat, cfg.train.microbatches) == ("full", 8) and "--train" not in why


def test_what_fits_nothing_is_refused_with_the_mesh_that_fits():
    cfg = with_changes(left_open(llama3_8b), mesh=MeshConfig(dp=8, fsdp=1))
    with pytest.raises(UserError) as refusal:
        choose_auto(cfg, h100s(8))
    refused = re.fullmatch(
        r"train\.remat='auto': nothing fits 8 x h100: dp8 .* full, the leanest, needs (\d+\.\d) of 72\.8 GiB a "
        r"GPU; take --mesh (\S+), or more GPUs",
        str(refusal.value),
    )
    assert refused is not None and float(refused[1]) > 72.8
    fitting = with_changes(left_open(llama3_8b), mesh=MeshConfig.parse(refused[2]))
    assert choose_auto(fitting, h100s(8))[1]
    with pytest.raises(UserError, match=r"^mesh='auto': nothing fits .*; take more GPUs, or a sma"):
        choose_auto(left_open(llama3_70b), h100s(8), choose_mesh=True, fixed=FLAT)


@pytest.mark.parametrize(
    ("remat", "microbatches", "fixed", "message"),
    [
        ("none", AUTO, None, r"^train\.microbatches='auto': nothing fits "),
        ("none", 1, {"remat": ("none",), "microbatches": (1,)}, r"^mesh='auto': nothing fits "),
        ("auto", 3, {"microbatches": (3,)}, r"^mesh='auto': none is legal on 16 GPUs"),
    ],
)
def test_values_that_stand_in_the_way_are_named_and_leaving_them_open_helps(
    remat, microbatches, fixed, message
):
    values = {"remat": remat, "microbatches": microbatches}
    cfg = with_changes(llama3_8b, mesh=MeshConfig(), **values, global_batch=512)
    asked = {} if fixed is None else {"choose_mesh": True, "fixed": FLAT | fixed}
    with pytest.raises(UserError, match=message) as refusal:
        choose_auto(cfg, h100s(16), **asked)
    words = str(refusal.value).partition("give ")[2]
    named = re.findall(r"train\.(\w+)=(\S+) in place of ('?\w+'?)", words)
    assert named and "more GPUs" not in words
    free = {"remat": "auto", "microbatches": AUTO}
    assert all((repr(free[n]), repr(values[n])) == (opened, now) for n, opened, now in named)
    freed = {name: free[name] for name, *_ in named}
    if asked:
        asked["fixed"] = {n: v for n, v in asked["fixed"].items() if n not in freed}
    cfg = with_changes(cfg, mesh=MeshConfig(), **freed)
    assert choose_auto(cfg, h100s(16), **asked)[1]


def test_a_faster_mesh_that_may_fit_is_named_and_a_compilation_settles_it():
    """At 71.1 of 72.8 GiB by formula; its program takes 70.8 + 1.0 and fits."""
    fixed = {"pp": (1, 2), "dp": (1,), "cp": (1,), "tp": (1,)}
    fixed |= {"zero": (2, 3), "schedule": ("interleaved",), "stash": ("residuals",)}
    cluster = h100s(8)
    cfg, why = choose_auto(load_recipe("qwen3_30b_a3b"), cluster, choose_mesh=True, fixed=fixed)
    assert estimate(Run.of(cfg, 8), cluster).verdict == FITS
    faster = re.search(
        r"; faster but unsure, (\d+)% of the memory by formula: (--mesh pp=2,ep=4 .*), (\S+) s a step; "
        r"`plan compile` with these options settles it$",
        why,
    )
    assert faster is not None and float(faster[1]) <= 100 * LIKELY
    assert estimate(Run.of(cfg, 8), cluster).step_s > EQUAL * float(faster[3])


def test_a_choice_that_may_not_fit_says_so():
    lean = breakdown(Run.of(pinned(deepseek_v3, "full", 60), 2048)).peak_bytes
    tight = h100s(2048, lean / GIB / 0.97)
    assert "unsure whether it fits" in choose_auto(left_open(deepseek_v3), tight)[1]


@pytest.mark.parametrize(("schedule", "least"), [("interleaved", 4), ("dualpipe_v", 8)])
def test_a_pipeline_gets_micro_batches_that_its_schedule_can_take(schedule, least):
    mesh, pp = MeshConfig(pp=4, fsdp=2), PipelineConfig(schedule=schedule)
    cfg = with_changes(left_open(llama3_8b), mesh=mesh, pp=pp)
    chosen, _ = choose_auto(cfg, h100s(8))
    assert chosen.train.microbatches >= least
    assert chosen == dataclasses.replace(cfg, train=chosen.train)


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
