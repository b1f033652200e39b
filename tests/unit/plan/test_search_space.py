"""The planner's candidates are exactly the legal configurations, each once."""

import dataclasses
import itertools
import math
import statistics

import pytest

from ultrascale_jax.cli.plan_commands.words import parse_choices, search_words
from ultrascale_jax.config import (
    HOST_MEMORY_SHARE,
    REMAT_POLICIES,
    SCHEDULES,
    ContextConfig,
    Keep,
    Lora,
    MeshConfig,
    UserError,
    offloads,
    remat_names,
    with_changes,
)
from ultrascale_jax.configs.debug import config as debug
from ultrascale_jax.configs.llama3_8b import config as llama3_8b
from ultrascale_jax.configs.mixtral_8x7b import config as mixtral
from ultrascale_jax.configs.moe_debug import config as moe_debug
from ultrascale_jax.plan.formulas.memory import breakdown, least_bytes, least_with_any_policy
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.search.search_space import (
    INPUTS,
    INPUTS_AND_ATTENTION,
    OFFLOADED,
    OFFLOADED_EXPERTS,
    POLICIES,
    UNEVEN,
    changed_options,
    configured,
    enumerate_runs,
)
from ultrascale_jax.plan.workload import Run

SPLIT = ("pp", "dp", "fsdp", "sp", "tp")
SIZES = (1, 2, 4, 8)
ON_DEVICE = {remat for remat in POLICIES if not remat_names(remat)[1]}


def cluster(num_gpus=8):
    return find_cluster(None, "h100", num_gpus)


def legal_by_brute_force(cfg, num_gpus):
    """Ask the trainer about every (mesh, zero, micro-batches), and return those that can be trained."""
    for sizes in itertools.product(SIZES, repeat=len(SPLIT)):
        mesh = MeshConfig(**({"fsdp": 1} | dict(zip(SPLIT, sizes, strict=True))))
        if math.prod(sizes) != num_gpus:
            continue
        for zero, microbatches in itertools.product(range(4), range(1, 17)):
            # fsdp without ZeRO is dp under another name, and ZeRO over one shard is none.
            if (zero == 0) != (mesh.fsdp == 1):
                continue
            try:
                Run.of(with_changes(cfg, mesh=mesh, zero=zero, microbatches=microbatches), num_gpus)
            except UserError:
                continue
            if microbatches >= mesh.pp:
                yield mesh, zero, microbatches


@pytest.mark.parametrize("global_batch", [16, 12])
def test_the_candidates_are_what_brute_force_finds(global_batch):
    cfg = with_changes(debug, mesh=MeshConfig(), global_batch=global_batch)
    space = enumerate_runs(cfg, cluster(), {}, SPLIT)
    found = [(run.mesh, run.zero, run.microbatches) for run in space.runs if run.remat == "none"]
    flat = [key for key in found if key[0].pp == 1]
    expected = set(legal_by_brute_force(cfg, 8))
    assert set(found) == expected
    assert len(flat) == len(set(flat)) > 50
    assert len(space.runs) == len(set(space.runs))
    assert {run.global_batch for run in space.runs} == {global_batch}


def test_every_candidate_comes_with_every_recompute_policy_and_a_pipeline_with_every_schedule():
    runs = enumerate_runs(debug, cluster(), {"schedule": SCHEDULES}, SPLIT).runs
    variants = {}
    for run in runs:
        key = (run.mesh, run.zero, run.microbatches)
        pipeline = (run.schedule, run.virtual_stages)
        variants.setdefault(key, set()).add((run.remat, run.stash, pipeline))
    for (mesh, zero, microbatches), found in variants.items():
        if mesh.pp == 1:
            tried = set(POLICIES) if zero == 3 else ON_DEVICE
            assert {remat for remat, _, _ in found} == tried
            assert len(found) == len(tried)
            continue
        assert {remat for remat, _, _ in found} == set(REMAT_POLICIES)
        tried = {(name, 1) for name in ("afab", "1f1b", "zb_uniform", "zb_h1")}
        # Eight layers: two stages a rank need pp <= 4.
        tried |= {("zb_v", 2), ("dualpipe_v", 2)} if mesh.pp <= 4 else set()
        if microbatches < 2 * mesh.pp:
            tried -= {("dualpipe_v", 2)}
        for stages in (2, 4):
            if mesh.pp * stages <= 8 and microbatches % mesh.pp == 0:
                tried |= {("interleaved", stages), ("zb_uniform", stages)}
        assert {pipeline for _, _, pipeline in found} == tried
        assert len(found) == len(REMAT_POLICIES) * 2 * len(tried)


def test_more_than_a_quarter_of_padding_is_left_out_unless_pinned():
    cfg = dataclasses.replace(debug, model=dataclasses.replace(debug.model, num_layers=5))
    free = enumerate_runs(cfg, cluster(), {}, SPLIT)
    assert {run.mesh.pp for run in free.runs} == {1, 2}  # 5 of 6, and 5 of 8
    assert free.illegal["model.num_layers"] > 0
    pinned = enumerate_runs(cfg, cluster(), {"pp": (4,)}, SPLIT)
    assert {run.rank_layers for run in pinned.runs} == {2}


def test_what_waits_in_lock_step_is_tried_only_where_it_is_asked_for():
    runs = enumerate_runs(debug, cluster(), {"pp": (2,)}, SPLIT).runs
    assert {run.schedule for run in runs} == set(SCHEDULES) - set(UNEVEN)


def test_layers_offload_what_the_host_has_the_memory_for():
    def offloaded(cfg, machine, axis="fsdp", size=8):
        runs = enumerate_runs(cfg, machine, {axis: (size,), "zero": (3,)}, SPLIT).runs
        return {(run.remat, run.sequences) for run in runs if remat_names(run.remat)[1]}

    usual = cluster()
    some = {Keep(saved=("q", "k", "v", "attn_core", "attn_out", "up"), offloaded=("gate",))}
    of_inputs = {INPUTS, INPUTS_AND_ATTENTION}
    assert {remat for remat, _ in offloaded(llama3_8b, usual)} == {*OFFLOADED, *of_inputs}
    # 8,192 tokens of 32 layers' gate are 7 GiB, and their inputs 2.
    small = find_cluster(f"1x8,450,50,{8 * 8 / HOST_MEMORY_SHARE},63", None, 8)
    fits = offloaded(llama3_8b, small)
    assert {pair for pair in fits if pair[0] not in of_inputs} == {(remat, 1) for remat in some}
    assert {sequences for remat, sequences in fits if remat == INPUTS} == {1, 2, 4}
    assert not offloaded(llama3_8b, find_cluster("1x8,450,50,0,63", None, 8))
    # An expert has a rank for itself, or two share one.
    assert {remat for remat, _ in offloaded(mixtral, usual, "ep")} == set(OFFLOADED_EXPERTS)
    assert not offloaded(mixtral, usual, "ep", 4)
    alone = enumerate_runs(llama3_8b, cluster(1), {}).runs
    assert {run.zero for run in alone if offloads(run.remat)} == {3} < {run.zero for run in alone}
    adapters = dataclasses.replace(
        llama3_8b.train, lora=Lora(rank=16), init_from="hf:folder", remat="full", microbatches=1
    )
    tuned = dataclasses.replace(llama3_8b, train=adapters)
    assert offloaded(tuned, usual) == offloaded(llama3_8b, usual)


def test_a_candidate_has_the_recipes_way_over_cp_and_heads_that_it_can_share():
    # debug has 8 query and 4 kv heads.
    cfg = dataclasses.replace(debug, cp=ContextConfig(strategy="ulysses"))
    space = enumerate_runs(cfg, cluster(), {}, ("fsdp", "cp", "sp"))
    assert {run.context for run in space.runs if run.mesh.cp > 1} == {cfg.cp}
    assert {run.mesh.cp * run.mesh.tensor for run in space.runs} <= {1, 2, 4, 8}
    assert all(Run.of(configured(cfg, run), 8) == run for run in space.runs)
    for run in space.runs:
        heads, ranks = debug.model.num_heads // run.mesh.tensor, run.ring[1]
        assert heads % ranks == 0
    one = dataclasses.replace(debug, cp=ContextConfig(ulysses=4))
    found = enumerate_runs(one, cluster(), {}, ("fsdp", "cp"))
    assert {run.mesh.cp for run in found.runs} == {1, 4, 8}  # 4 does not divide 2
    assert found.illegal["cp.ulysses"] > 0


def test_a_tensor_group_stays_in_its_node_unless_asked():
    free = enumerate_runs(llama3_8b, cluster(16), {"pp": (1,), "dp": (1,)}, SPLIT)
    assert max(run.mesh.tensor for run in free.runs) == 8
    assert free.illegal["tensor group larger than a node"] == 5
    asked = enumerate_runs(llama3_8b, cluster(16), {"tp": (16,)}, SPLIT)
    assert {run.mesh.tp for run in asked.runs} == {16}


def test_pinned_fields_keep_to_their_values():
    choices = parse_choices("fixed", "tp=2,zero=1 remat=full sequences=1,2")
    runs = enumerate_runs(debug, cluster(), choices, SPLIT).runs
    assert {run.mesh.tp for run in runs} == {2}
    assert {(run.zero, run.remat) for run in runs} == {(1, "full")}
    assert {run.sequences for run in runs} == {1, 2}
    free = enumerate_runs(debug, cluster(), {}, SPLIT).runs
    same = [
        run
        for run in free
        if (run.mesh.tp, run.zero, run.remat) == (2, 1, "full") and run.sequences <= 2
    ]
    assert set(same) <= set(runs)


def test_folding_is_pinned_and_named_as_a_switch():
    folded = dataclasses.replace(moe_debug, moe=dataclasses.replace(moe_debug.moe, folding=True))
    for pinned in (0, 1):
        choices = parse_choices("fixed", f"folding={pinned},sp=2,tp=1")
        runs = enumerate_runs(moe_debug, cluster(), choices, SPLIT).runs
        assert {run.folds for run in runs} == {bool(pinned)}
    assert changed_options(moe_debug, folded, mesh=False) == "--moe.folding"
    assert changed_options(folded, moe_debug, mesh=False) == "--moe.no-folding"
    # The option behind the switch stays.
    more = dataclasses.replace(folded, moe=dataclasses.replace(folded.moe, aux_weight=0.5))
    assert search_words("moe_debug", more)[-2:] == ["--moe.aux-weight", "0.5"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor=8", "'tensor' is none of pp, dp"),
        ("tp=8,tp=4", "'tp' is given twice"),
        ("8", "write it as tp=8,pp=1"),
        ("tp=0", "tp is a number, 1 or more"),
        ("folding=2", "folding is a number from 0 to 1"),
        ("schedule=gpipe", "schedule is one of afab, 1f1b"),
        ("remat=some", "train.remat='some'"),
    ],
)
def test_choices_that_mean_nothing_are_refused(text, message):
    with pytest.raises(UserError) as error:
        parse_choices("fixed", text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "cfg", [debug, with_changes(debug, mesh=debug.mesh, global_batch=1), moe_debug]
)
def test_what_is_left_out_for_its_state_needs_more_than_the_limit(cfg):
    """The lower bounds are some, and each mesh, stage and schedule that is left out is shown by one run."""
    every = enumerate_runs(cfg, cluster(), {}, SPLIT)
    peaks = {run: breakdown(run).peak_bytes for run in every.runs}
    assert all(least_bytes(run) <= peak for run, peak in peaks.items())
    for variants in every.variants:
        assert least_with_any_policy(variants.of) <= min(peaks[run] for run in variants)
    limit = statistics.median(peaks.values())
    some = enumerate_runs(cfg, cluster(), {}, SPLIT, limit_bytes=limit)
    assert {run for run, peak in peaks.items() if peak <= limit} <= set(some.runs)
    assert all(least_bytes(run) > limit for run in some.oversized)
