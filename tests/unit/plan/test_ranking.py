"""The search finds the fastest that fits, says why the others lost, and keeps what it has."""

import dataclasses

import pytest

from tests.recipes import pinned
from ultrascale_jax.cli.plan_commands.words import parse_choices
from ultrascale_jax.config import SCHEDULES, Split, UserError, with_changes
from ultrascale_jax.configs.debug import config as debug
from ultrascale_jax.configs.llama3_8b import config as llama3_8b
from ultrascale_jax.configs.llama3_70b import config as llama3_70b
from ultrascale_jax.configs.llama32_1b import config as llama32_1b
from ultrascale_jax.configs.shapes import MIXTRAL_8X7B
from ultrascale_jax.plan.auto import choose_auto
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import find_cluster, find_gpu
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.search.ranking import (
    EQUAL,
    PROMISING,
    NotCompiled,
    Search,
    family,
    kind,
)
from ultrascale_jax.plan.search.ranking import search as search_meshes
from ultrascale_jax.plan.search.search_space import (
    POLICIES,
    UNEVEN,
    configured,
    drawback,
    enumerate_runs,
)
from ultrascale_jax.plan.verdict import FITS, SURE
from ultrascale_jax.plan.workload import Run

GIB = 2**30


FLAT = "pp=1,cp=1,dp=1,tp=1"


def searched(cfg, num_gpus, fixed=""):
    choices = parse_choices("fixed", fixed) if fixed else {}
    search = Search(cfg, find_cluster(None, "h100", num_gpus), choices)
    search.predict()
    return search


def ran(size=GIB, step_s=5.0, **parts):
    return StepPrediction(
        run=Run.of(pinned(llama3_8b), 8),  # any: the search knows which one it asked for
        gpu=find_gpu("h100"),
        source="compiled",
        step_s=step_s,
        parts=parts or {"work": step_s},
        peak_bytes=size,
    )


def test_the_winner_is_the_fastest_that_fits_and_that_the_trainer_runs():
    search = searched(llama3_8b, 8, "cp=1,dp=1,tp=1")
    cluster = find_cluster(None, "h100", 8)
    choices = {"cp": (1,), "dp": (1,), "tp": (1,)}
    runs = enumerate_runs(llama3_8b, cluster, choices, ("pp", "fsdp", "sp")).runs
    fitting = [run for run in runs if breakdown(run).peak_bytes <= SURE * cluster.gpu.usable_bytes]
    times = [estimate(run, cluster).step_s for run in fitting if not drawback(run)]
    # What recomputes without need is slower than what does not, so leaving it out changes nothing.
    fastest = min(c.formula.step_s for c in search.ranking if c.verdict == FITS)
    assert fastest <= min(times)
    assert search.winner.formula.step_s <= EQUAL * fastest and search.winner.verdict == FITS
    counts = search.counts
    split = [c for c in search.ranking if isinstance(c.run.remat, Split)]
    assert counts["candidates"] == len(runs) + len(split)
    assert counts["fits"] + counts["recomputes without need"] >= len(fitting)
    parts = ("fits", "unsure", "does not fit", "recomputes without need")
    assert sum(counts[name] for name in parts) == counts["candidates"]
    assert counts["does not fit"] > 0


def test_recomputation_is_left_out_where_less_fits_with_room():
    search = searched(debug, 8, "fsdp=8")
    assert {c.run.remat for c in search.ranking} == {"none", "selective"}
    tight, by_work = searched(llama3_8b, 8, "fsdp=8 zero=3"), {}
    for c in (c for c in tight.ranking if c.run.remat in POLICIES):
        by_work.setdefault(dataclasses.replace(c.run, remat="none"), []).append(c)
    for same in by_work.values():
        most = max(POLICIES.index(c.run.remat) for c in same)
        less = [c for c in same if POLICIES.index(c.run.remat) < most and not c.best.host_bytes]
        assert all(c.best.peak_bytes > SURE * tight.usable_bytes for c in less)


def test_a_pipeline_is_recommended_with_a_schedule_for_lock_step():
    search = searched(debug, 8, f"pp=2,schedule={','.join(SCHEDULES)}")
    assert search.winner.run.mesh.pp == 2 and not drawback(search.winner.run)
    changes = search.rows(1)["one change to the best"]
    others = {c.run.schedule: verdict for c, verdict in changes if c.run.schedule in UNEVEN}
    assert others
    for schedule, verdict in others.items():
        assert verdict.startswith(f"{schedule} is slow in lock step")
        assert " slower: bubble " in verdict
    only = searched(llama3_8b, 16, "pp=4,schedule=zb_h1")
    assert only.ranking and only.winner is None


def test_of_several_global_batches_the_one_with_the_most_tokens_a_second_wins():
    fixed = "fsdp=8,zero=3,microbatches=1,remat=full,global_batch="
    small, large, both = (searched(llama3_8b, 8, f"{fixed}{n}") for n in ("8", "16", "8,16"))
    assert both.counts["candidates"] == sum(s.counts["candidates"] for s in (small, large))
    assert both.winner.run == large.winner.run
    assert large.winner.best.step_s > small.winner.best.step_s
    assert configured(both.cfg, both.winner.run).train.global_batch == 16
    ((other, verdict),) = both.rows(1)["one change to the best"]
    assert other.run == small.winner.run
    lost = large.winner.best.tokens_per_s_gpu / other.best.tokens_per_s_gpu - 1
    assert verdict.startswith(f"{lost:.1%} slower: ")


def test_what_is_compiled_replaces_the_formula():
    search = searched(llama3_8b, 8, FLAT)
    seen = []

    def evaluate(cfg):
        seen.append(cfg)
        return ran(step_s=10.0 - len(seen))

    for candidate in search.compile(evaluate, 3):
        assert not candidate.refusal and candidate.compiled is None
    assert len(seen) == 3
    assert search.step_s(search.winner) == 7.0
    assert configured(search.cfg, search.winner.run) == seen[-1]
    assert [search.step_s(c) for c in search.ranking[:3]] == [7.0, 8.0, 9.0]
    assert all(c.compiled is None for c in search.ranking[3:])


def test_promising_kinds_are_compiled_in_turn_before_more_of_the_fastest():
    search = searched(llama3_70b, 64, "dp=1,tp=1,sp=8")
    ours = [c for c in search.ranking if not c.refusal]
    best, fastest = kind(ours[0].run), []

    def evaluate(cfg):
        run = Run.of(cfg, 64)
        fastest.extend([kind(run)] if run.mesh.pp > 1 and not fastest else [])
        return ran(step_s=1.0 if kind(run) in fastest else 2.0)

    runs = [c.run for c in search.compile(evaluate, 8)]
    first, kinds = runs[:5], [kind(run) for run in runs]
    assert kinds[0] == best and len(set(kinds[:5])) == 5
    # A flat mesh, cp, a pipeline, and a pipeline with cp before another of any.
    assert len({family(run) for run in first[:4]}) == 4
    limit = PROMISING * ours[0].formula.step_s
    assert all(estimate(run, search.cluster).step_s <= limit for run in first)
    assert kinds[5:] == fastest * 3


def test_what_does_not_fit_or_compile_after_all_loses():
    search = searched(llama3_8b, 8, FLAT)
    answers = iter([ran(200 * GIB), NotCompiled("it crashed"), ran(step_s=30.0)])

    def evaluate(cfg):
        answer = next(answers)
        if isinstance(answer, NotCompiled):
            raise answer
        return answer

    first, second, third = [c.run for c in search.compile(evaluate, 3)]
    assert search.winner.run == third
    assert {c.run for c in search.ranking[-2:]} == {first, second}
    verdicts = {c.run: v for c, v in search.rows(10**6)["the best of each mesh"]}
    assert verdicts[first].startswith("does not fit: compiled, it needs 200.0 of")


def test_formulas_are_corrected_by_what_was_compiled_of_their_kind():
    search = searched(llama3_70b, 64, f"{FLAT},sp=8")
    before = {c.run: search.step_s(c) for c in search.ranking}
    pending = iter([ran(step_s=20.0), ran(step_s=40.0)])
    first, second = [c.run for c in search.compile(lambda cfg: next(pending), 2)]
    assert kind(first) != kind(second)
    ratios = {kind(first): 20.0 / before[first], kind(second): 40.0 / before[second]}
    middle = sum(ratios.values()) / 2
    for c in search.ranking:
        if c.run not in (first, second):
            expected = before[c.run] * ratios.get(kind(c.run), middle)
            assert search.step_s(c) == pytest.approx(expected)
    for c, verdict in search.rows(10**6)["the best of each mesh"]:
        faster = before[c.run] < before[search.winner.run] * 0.99
        if faster and not c.compiled and search.step_s(c) > search.step_s(search.winner) * 1.01:
            assert "slower, by formula alone -" in verdict


def llama(seq_len: int):
    return dataclasses.replace(llama3_8b, data=dataclasses.replace(llama3_8b.data, seq_len=seq_len))


def few_layers(num_layers: int):
    """Mixtral of a few layers, with 16 experts."""
    experts = dataclasses.replace(MIXTRAL_8X7B.experts, num=16)
    model = dataclasses.replace(MIXTRAL_8X7B, num_layers=num_layers, experts=experts)
    train = dataclasses.replace(llama3_8b.train, global_batch=64)
    return dataclasses.replace(llama3_8b, model=model, train=train)


SMALL = "pp=1,dp=1,tp=1,sp=1,zero=3,remat=full"


@pytest.mark.parametrize(
    ("cfg", "num_gpus", "fixed", "axis", "sizes"),
    [
        # Pieces of 4,096 tokens, unless another size is asked for.
        (llama(4096), 8, SMALL, "cp", {1}),
        (llama(8192), 8, SMALL, "cp", {1, 2}),
        (llama(16384), 8, SMALL, "cp", {1, 2, 4}),
        (llama(4096), 8, f"{SMALL},cp=8", "cp", {8}),
        # Experts within a node, or across nodes where nothing else fits: with ZeRO-0 a rank keeps all of its experts.
        (few_layers(4), 16, "pp=1,dp=1,cp=1,tp=1,sp=1,zero=3", "ep", {1, 2, 4, 8}),
        (few_layers(12), 16, "pp=1,zero=0,fsdp=1,sp=1,tp=1", "ep", {16}),
        (llama3_8b, 8, f"{FLAT},zero=3,remat=full", "ep", {1}),
    ],
)
def test_sequences_and_experts_are_split_as_far_as_they_should(cfg, num_gpus, fixed, axis, sizes):
    ranking = searched(cfg, num_gpus, fixed).ranking
    assert {getattr(c.run.mesh, axis) for c in ranking} == sizes


def test_experts_across_nodes_are_exchanged_in_two_parts():
    search = searched(few_layers(4), 16, "pp=1,dp=1,fsdp=1,ep=16")
    assert {(c.run.mesh.ep, c.run.moe.a2a_groups) for c in search.ranking} == {(16, 2)}
    assert configured(search.cfg, search.winner.run).moe.a2a_groups == 2


def test_short_sequences_are_split_over_cp_where_nothing_else_fits():
    # One sequence, and a tensor group of no more than 8: without cp only a pipeline employs 16 GPUs.
    one = dataclasses.replace(debug, train=dataclasses.replace(debug.train, global_batch=1))
    assert searched(one, 16).winner.run.mesh.cp == 2
    assert searched(one, 16, "cp=1").winner is None


@pytest.mark.parametrize("fixed", ["pp=2,dp=1,tp=1,cp=2,sp=1", "pp=1,sp=1,tp=1,cp=1,2"])
def test_candidates_that_share_terms_have_those_of_their_own_configuration(fixed):
    search = searched(few_layers(4), 16, fixed)
    ranking = search.ranking
    assert len({(c.run.schedule, c.run.zero) for c in ranking}) > 2
    for candidate in ranking[:: len(ranking) // 60]:
        alone = Run.of(candidate.configured(search.cfg), 16)
        assert alone == candidate.run
        assert estimate(alone, search.cluster).summary() == candidate.formula.summary()


def test_the_public_search_gives_the_ranking_with_the_recommended_candidate_first():
    cluster, fixed = find_cluster(None, "h100", 8), {"pp": 1, "dp": [1, 2], "tp": 1, "sp": 1}
    ranked = search_meshes(llama3_8b, cluster, fixed=fixed)
    whole = searched(llama3_8b, 8, "pp=1,dp=1,2,tp=1,sp=1")
    assert ranked[0].run == whole.winner.run and ranked[0].verdict == FITS
    assert {c.run for c in ranked} == {c.run for c in whole.ranking}
    cfg = ranked[0].configured(llama3_8b).check(8)
    assert cfg.mesh == ranked[0].run.mesh and not cfg.train.auto


@pytest.mark.parametrize(
    ("gib", "says"),
    [
        (6, ["not enough: {host} saves 3.6 GiB, {round} saves 2.3 GiB, {round} {weights} saves"]),
        (8, ["fits with {host}: fsdp2", "may fit with {round}: ", "fits with {round} {weights}: "]),
        (10, ["nothing fits", "fits with {host}: fsdp2", "fits with {round}: fsdp2"]),
        (11, ["unsure, 0.0867 s a step", "fits with {host}: ", "fits with {round}: fsdp2"]),
        (14, ["best: fsdp2"]),
    ],
)
def test_a_smaller_state_on_the_gpu_is_named_where_nothing_else_fits_and_never_chosen(gib, says):
    cfg = with_changes(llama32_1b, mesh=llama32_1b.mesh, global_batch=4)
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, seq_len=2048))
    cluster = find_cluster(None, "h100", 2)
    cluster = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, memory_gib=gib))
    search = Search(cfg, cluster)
    search.predict()
    names = {"host": "--optim.offload both", "weights": "--optim.weight-dtype bfloat16"}
    names["round"] = "--optim.moment-dtype bfloat16 --optim.stochastic-rounding"
    for text in says:
        assert text.format(**names) in search.answer
    assert (" with --optim" in search.answer) == any(" with {" in text for text in says)
    chosen, _ = choose_auto(cfg, cluster, choose_mesh=True, must_fit=False)
    assert chosen.optim == cfg.optim
    if search.winner is None:
        with pytest.raises(UserError, match=r"nothing fits .*--optim\.offload both"):
            choose_auto(cfg, cluster, choose_mesh=True)


def test_if_nothing_compiled_fits_more_is_tried_and_a_machine_that_cannot_compile_is_not_asked_for_ever():
    search = searched(llama3_8b, 8, FLAT)
    assert len(list(search.compile(lambda cfg: ran(200 * GIB), 2))) == 4
    assert search.winner.compiled is None
    search = searched(llama3_8b, 8, FLAT)
    best = search.winner.run

    def evaluate(cfg):
        raise NotCompiled("no plugin")

    assert len(list(search.compile(evaluate, 6))) == 2
    assert search.winner.run == best
    assert search.rows(3)["the best of each mesh"][0][1] == "best"


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"tensor": 8}, "fixed='tensor': is no field of a candidate: pp, "),
        ({"tp": 3}, "nothing is legal on 8"),
    ],
)
def test_the_public_search_refuses_unknown_fields_and_what_is_never_legal(fixed, message):
    with pytest.raises(UserError, match=message):
        search_meshes(llama3_8b, find_cluster(None, "h100", 8), fixed=fixed)
