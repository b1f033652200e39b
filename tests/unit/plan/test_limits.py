"""The fewest GPUs and the longest sequence are those of a loop over all of them."""

import dataclasses

import pytest

from ultrascale_jax.cli.command_line import load_recipe
from ultrascale_jax.config import AUTO, Config, MeshConfig, UserError, with_changes
from ultrascale_jax.plan.auto import choices_of_mesh, choose_auto
from ultrascale_jax.plan.hardware import Cluster, find_cluster
from ultrascale_jax.plan.search.leanest import leanest_verdict
from ultrascale_jax.plan.search.limits import fewest_gpus, longest, longest_on, with_length
from ultrascale_jax.plan.search.ranking import Search
from ultrascale_jax.plan.verdict import DOES_NOT_FIT, FITS, UNSURE


def small_gpus(num_gpus: int, gib: float, per_node: int = 4) -> Cluster:
    """GPUs with so little memory that small models need several, in nodes that are full at once."""
    cluster = find_cluster(None, "h100", num_gpus)
    gpu = dataclasses.replace(cluster.gpu, memory_gib=gib)
    return dataclasses.replace(cluster, gpu=gpu, gpus_per_node=per_node)


def asked(name: str, batch: int, seq_len: int = 2048) -> Config:
    cfg = with_length(load_recipe(name), seq_len)
    free = {"remat": "auto", "microbatches": AUTO}
    return with_changes(cfg, mesh=cfg.mesh, global_batch=batch, **free)


def searched_verdict(cfg: Config, cluster: Cluster, choices: dict) -> str:
    """The verdict of what a complete search recommends."""
    search = Search(cfg, cluster, choices)
    search.predict()
    return DOES_NOT_FIT if search.winner is None else search.winner.verdict


@pytest.mark.parametrize(
    ("name", "batch", "gib", "choices"),
    [
        ("llama32_1b", 6, 9, {"cp": (1,)}),
        ("llama32_1b", 8, 12, {"zero": (1,)}),
        ("llama32_1b", 8, 16, {"remat": ("none",), "tp": (2,)}),
        ("qwen3_30b_a3b", 4, 100, {"pp": (1,)}),
        ("smollm2_135m", 4, 1.5, {}),
    ],
)
def test_the_fewest_gpus_are_those_of_a_loop_over_counts(name, batch, gib, choices):
    cfg = asked(name, batch)
    verdicts = {}
    for count in (1, 2, 3, 4, 8, 12, 16):
        verdicts[count] = searched_verdict(cfg, small_gpus(count, gib), choices)
        if verdicts[count] == FITS:
            break
    first = {v: next((n for n, own in verdicts.items() if own == v), None) for v in (FITS, UNSURE)}
    sure, unsure, _ = fewest_gpus(cfg, small_gpus(1, gib), lambda count: choices)
    assert sure is not None and sure.step.run.num_gpus == first[FITS] > 1
    assert (None if unsure is None else unsure.step.run.num_gpus) == first[UNSURE]
    machine = small_gpus(first[FITS], gib)
    best = Search(cfg, machine, choices)
    best.predict()
    assert best.winner is not None and sure.step == best.winner.formula


@pytest.mark.parametrize(
    ("name", "batch", "gib"),
    [("llama32_1b", 4, 9), ("smollm2_135m", 8, 0.9), ("smollm2_135m", 8, 3)],
)
def test_the_leanest_decide_as_a_complete_search(name, batch, gib):
    for count, seq_len in ((2, 2048), (4, 2048), (4, 32768)):
        cfg, cluster = asked(name, batch, seq_len), small_gpus(count, gib)
        assert leanest_verdict(cfg, cluster, {}) == searched_verdict(cfg, cluster, {})


def test_what_no_number_of_gpus_holds_is_none():
    cfg = asked("smollm2_135m", 1, 2**20)
    sure, unsure, most = fewest_gpus(cfg, small_gpus(1, 1.5), lambda count: {"cp": (1,)})
    assert sure is unsure is None and most >= 16


def test_numbers_that_a_mesh_excludes_are_left_out():
    def of_two(count: int) -> dict:
        if count % 2:
            raise UserError("mesh='tp=2': must divide the GPUs")
        return {"tp": (2,)}

    cfg = asked("llama32_1b", 4)
    sure, _, _ = fewest_gpus(cfg, small_gpus(1, 80), of_two)
    assert sure is not None and sure.step.run.num_gpus == 2 and sure.step.run.mesh.tp == 2


@pytest.mark.parametrize("mesh", ["fsdp=4", "pp=2,fsdp=2"])
def test_the_longest_sequence_on_a_mesh_is_that_of_a_loop_over_lengths(mesh):
    cfg = asked("llama32_1b", 4)
    cfg = with_changes(cfg, mesh=MeshConfig.parse(mesh), remat="full")
    cluster = small_gpus(4, 12)
    choices = choices_of_mesh(cfg, cluster)
    found = longest_on(cfg, cluster, choices)

    def fits(tokens: int) -> bool:
        try:
            _, why = choose_auto(with_length(cfg, tokens), cluster)
        except UserError:
            return False
        return "unsure whether" not in why

    lengths = range(1024, 2 * found + 1024, 1024)
    assert found == max(tokens for tokens in lengths if fits(tokens))


def test_the_longest_sequence_on_any_mesh_is_exact_to_an_eighth():
    cfg, cluster = asked("smollm2_135m", 2), small_gpus(4, 3)
    fitting = [
        tokens
        for exponent in range(14, 17)
        for tokens in range(2**exponent, 2 ** (exponent + 1), 2**exponent // 8)
        if searched_verdict(with_length(cfg, tokens), cluster, {}) == FITS
    ]
    found = longest(cfg, cluster, {}, fitting=0)
    assert found == max(fitting)
    assert longest(cfg, cluster, {}, fitting=2048 + 1024) == found < 2**17
    assert longest(cfg, small_gpus(4, 0.3), {}, fitting=0) == 0
