"""The planner's candidates are exactly the legal configurations, each once."""

import dataclasses
import itertools
import math

import pytest

from configs.debug import config as debug
from configs.llama3_8b import config as llama3_8b
from ultrascale_jax.config import AXES, MeshConfig, UserError
from ultrascale_jax.plan.candidates import (
    REMAT,
    configured,
    divisors,
    enumerate_runs,
    meshes,
    parse_choices,
    require_parts,
    told_to,
)
from ultrascale_jax.plan.hardware import find_cluster
from ultrascale_jax.plan.workload import SCHEDULES, Run, Shape

SPLIT = ("pp", "dp", "fsdp", "sp", "tp")
SIZES = (1, 2, 4, 8)


def cluster(num_gpus=8):
    return find_cluster(None, "h100", num_gpus)


def legal_by_brute_force(cfg, num_gpus):
    """What can be trained, as (mesh, zero, micro-batches), by asking the trainer about everything."""
    for sizes in itertools.product(SIZES, repeat=len(SPLIT)):
        mesh = MeshConfig(**({"fsdp": 1} | dict(zip(SPLIT, sizes, strict=True))))
        if math.prod(sizes) != num_gpus:
            continue
        for zero, micro_batches in itertools.product(range(4), range(1, 17)):
            # fsdp without ZeRO is dp under another name, and ZeRO over one shard is none.
            if (zero == 0) != (mesh.fsdp == 1):
                continue
            try:
                Run.of(told_to(cfg, mesh=mesh, zero=zero, micro_batches=micro_batches), num_gpus)
            except UserError:
                continue
            if cfg.model.num_layers % mesh.pp == 0 and micro_batches >= mesh.pp:
                yield mesh, zero, micro_batches


@pytest.mark.parametrize("global_batch", [16, 12])
def test_the_candidates_are_what_brute_force_finds(global_batch):
    cfg = told_to(debug, mesh=MeshConfig(), global_batch=global_batch)
    space = enumerate_runs(cfg, cluster(), {}, SPLIT)
    found = [(run.mesh, run.zero, run.micro_batches) for run in space.runs if run.remat == "none"]
    flat = [key for key in found if key[0].pp == 1]
    expected = set(legal_by_brute_force(cfg, 8))
    assert set(found) == expected
    assert len(flat) == len(set(flat)) > 50
    assert len(space.runs) == len(set(space.runs))
    assert {run.global_batch for run in space.runs} == {global_batch}


def test_every_candidate_comes_with_every_recompute_policy_and_a_pipeline_with_every_schedule():
    runs = enumerate_runs(debug, cluster(), {}, SPLIT).runs
    variants = {}
    for run in runs:
        key = (run.mesh, run.zero, run.micro_batches)
        variants.setdefault(key, set()).add((run.remat, run.schedule, run.virtual_stages))
    for (mesh, _, _), found in variants.items():
        assert {remat for remat, _, _ in found} == set(REMAT)
        if mesh.pp == 1:
            assert len(found) == len(REMAT)
        else:
            # Eight layers: two stages a rank need pp <= 4.
            bubble_free_only = {"afab", "1f1b", "zb_uniform", "zb_h1"}
            assert {s for _, s, _ in found} == (
                set(SCHEDULES) if mesh.pp <= 4 else bubble_free_only
            )
            assert all(8 % (mesh.pp * stages) == 0 for _, _, stages in found)


def test_only_pipelines_are_refused_by_this_release():
    space = enumerate_runs(debug, cluster(), {}, SPLIT)
    for run in space.runs:
        assert space.refusal(run) == ("this release has no pipeline" if run.mesh.pp > 1 else "")


def test_models_that_the_trainer_does_not_have_are_refused():
    experts = Shape.of(debug.model, num_experts=4)
    space = enumerate_runs(debug, cluster(), {}, ("ep", "fsdp"), experts)
    assert {run.mesh.ep for run in space.runs} == {1, 2, 4}
    assert {space.refusal(run) for run in space.runs} == {"this release trains no such model"}
    assert enumerate_runs(debug, cluster(), {}, ("fsdp",), precision="fp8").refusals


def test_what_the_trainer_is_told_is_the_run():
    for run in enumerate_runs(debug, cluster(), {"pp": (1,)}, SPLIT).runs:
        assert Run.of(configured(debug, run), 8) == run


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


def test_an_axis_outside_the_choices_is_1():
    found = list(meshes(8, {"fsdp": (2, 4)}, ("sp",)))
    assert [(mesh.fsdp, mesh.sp) for mesh in found] == [(2, 4), (4, 2)]
    assert all(math.prod(mesh.sizes.values()) == 8 for mesh in found)
    assert list(meshes(8, {"fsdp": (3,)}, AXES)) == []


def test_a_recipes_own_recompute_policy_is_a_candidate_too():
    train = dataclasses.replace(debug.train, remat="save:q,k,v")
    cfg = dataclasses.replace(debug, train=train)
    runs = enumerate_runs(cfg, cluster(), {}, ("fsdp",)).runs
    assert {run.remat for run in runs} == {*REMAT, "save:q,k,v"}


@pytest.mark.parametrize(
    ("pp", "schedule", "stages", "message"),
    [
        (3, "1f1b", 1, "model.num_layers=8: must be divisible by mesh.pp=3"),
        (4, "interleaved", 3, "model.num_layers=8: .* mesh.pp=4 \\* virtual_stages=3"),
        (4, "interleaved", 1, "virtual_stages=1: schedule interleaved has 2 or more"),
        (4, "1f1b", 2, "virtual_stages=2: schedule 1f1b has 1"),
        (4, "zb_v", 1, "virtual_stages=1: schedule zb_v has 2"),
        (4, "zb_v", 2, ""),
        (4, "zb_uniform", 1, ""),
        (1, "1f1b", 2, ""),
    ],
)
def test_a_pipeline_has_equal_stages_and_as_many_as_its_schedule_wants(
    pp, schedule, stages, message
):
    run = Run(
        shape=Shape.of(debug.model),
        mesh=MeshConfig(pp=pp, fsdp=1),
        seq_len=256,
        sequences=1,
        schedule=schedule,
        virtual_stages=stages,
    )
    if message:
        with pytest.raises(UserError, match=message):
            require_parts(run)
    else:
        require_parts(run)


def test_what_is_pinned_so_that_nothing_is_left_is_counted():
    choices = {"pp": (2,), "virtual_stages": (9,)}
    assert enumerate_runs(debug, cluster(), choices, SPLIT).illegal["virtual_stages"] > 0
    assert enumerate_runs(debug, cluster(), {"sequences": (77,)}, SPLIT).illegal["sequences"] > 0


def test_divisors_of_large_numbers_are_found_at_once():
    assert divisors(1) == (1,) and divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert divisors(2**36) == tuple(2**n for n in range(37))


def test_choices_are_read_with_commas_and_spaces():
    assert parse_choices("fixed", "tp=8,pp=1") == {"tp": (8,), "pp": (1,)}
    expected = {"fsdp": (1, 2, 4), "remat": ("none", "full"), "micro_batches": (2,)}
    assert parse_choices("grid", "fsdp=1,2,4 remat=none,full micro-batches=2") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor=8", "'tensor' is none of pp, dp"),
        ("tp=8,tp=4", "'tp' is given twice"),
        ("tp=", "write it as tp=8,pp=1"),
        ("8", "write it as tp=8,pp=1"),
        ("", "write it as tp=8,pp=1"),
        ("tp=0", "tp is a number, 1 or more"),
        ("tp=-2", "tp is a number, 1 or more"),
        ("zero=4", "zero is a number from 0 to 3"),
        ("schedule=gpipe", "the schedules are afab"),
        ("remat=some", "train.remat='some'"),
    ],
)
def test_choices_that_mean_nothing_are_refused(text, message):
    with pytest.raises(UserError) as error:
        parse_choices("fixed", text)
    assert message in str(error.value)
