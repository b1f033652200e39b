"""The rows of buffers: what balanced routing sends, counted by hand over all choices that a token may have."""

import itertools

import jax
import numpy as np
import pytest

from ultrascale_jax.config import Experts, MoEConfig
from ultrascale_jax.configs import shapes
from ultrascale_jax.models.moe import route
from ultrascale_jax.parallel.experts.capacity import (
    A2AStage,
    a2a_stages,
    capacity,
    expert_capacity_factor,
    hit_fraction,
    scaled,
)


def counted(experts: Experts, count: int) -> float:
    """Share of a token's equally likely choices, spread over its groups, that hold one of the first `count` experts."""
    size, hits, total = experts.num // experts.groups, 0, 0
    for groups in itertools.combinations(range(experts.groups), experts.groups_per_token):
        open_ = [e for e in range(experts.num) if e // size in groups]
        for chosen in itertools.combinations(open_, experts.top_k):
            loads = [sum(e // size == group for e in chosen) for group in groups]
            if max(loads) - min(loads) <= 1:
                hits += any(e < count for e in chosen)
                total += 1
    return hits / total


@pytest.mark.parametrize(
    ("experts", "counts"),
    [
        (Experts(num=8, top_k=2), (1, 2, 4, 7, 8)),
        (Experts(num=6, top_k=3), (1, 2, 3, 6)),
        (Experts(num=12, top_k=3, groups=4, groups_per_token=2), (1, 2, 3, 6, 9)),
        (Experts(num=12, top_k=4, groups=3, groups_per_token=2), (1, 3, 4, 8)),
        (Experts(num=8, top_k=2, groups=4, groups_per_token=1), (1, 2)),
    ],
)
def test_the_share_of_tokens_is_that_of_all_choices(experts, counts):
    for count in counts:
        assert hit_fraction(experts, count) == pytest.approx(counted(experts, count))


@pytest.mark.parametrize("count", [4, 32, 64])
def test_a_router_with_groups_sends_hardly_fewer_tokens(count):
    """To a rank of 64 of DeepSeek-V3's, to a node of 8, and to two nodes, with scores by chance."""
    experts = shapes.DEEPSEEK_V3.experts
    assert experts is not None
    ids, _, _ = route(jax.random.normal(jax.random.key(0), (16384, experts.num)), experts)
    parts = np.asarray(ids) // count
    sent = np.mean([np.any(parts == part, 1) for part in range(experts.num // count)])
    assert 0.97 < sent / hit_fraction(experts, count) <= 1


@pytest.mark.parametrize(
    ("tokens", "expected", "bound", "rows"),
    [(128, 16, 1.0, 16), (128, 16.1, 1.0, 24), (128, 16, 1.5, 24), (20, 16, 1.5, 20), (4, 1, 1, 4)],
)
def test_rows_are_a_multiple_of_8_and_no_more_than_tokens(tokens, expected, bound, rows):
    assert capacity(tokens, expected, bound) == rows


def test_an_expert_alone_on_its_rank_has_less_room():
    """The sum over 4 ranks deviates half as much from its mean as the rows of one."""
    experts, moe = Experts(num=4, top_k=2), MoEConfig(capacity_factor=1.25)
    assert expert_capacity_factor(moe, experts, 4) == 1.125
    assert expert_capacity_factor(moe, experts, 2) == 1.25


def test_what_a_later_round_sends_finds_room_for_its_share():
    assert scaled(100, 800, 800) == 100
    assert scaled(100, 80, 800) == 16
    assert scaled(100, 8, 800) == 8


EXPERTS = Experts(num=8, top_k=2)


def test_one_exchange_between_all_ranks():
    # C(6, 2) of the C(8, 2) choices leave two experts out.
    rows = capacity(64, 64 * (1 - 15 / 28), 1.0)
    assert a2a_stages(MoEConfig(capacity_factor=1.0), EXPERTS, 4, 64) == [
        A2AStage(parts=4, experts=2, rows=rows)
    ]


def test_two_exchanges_first_between_nodes_and_then_inside():
    """A rank takes part in the second with what the ranks in its place on all nodes have sent it."""
    across, inside = a2a_stages(MoEConfig(capacity_factor=1.0, a2a_groups=2), EXPERTS, 8, 64)
    assert across == A2AStage(
        parts=2, experts=4, rows=capacity(64, 64 * hit_fraction(EXPERTS, 4), 1.0)
    )
    received = 2 * across.rows
    assert inside == A2AStage(
        parts=4, experts=1, rows=capacity(received, 2 * 64 * hit_fraction(EXPERTS, 1), 1.0)
    )


@pytest.mark.parametrize("nodes", [1, 8])
def test_as_many_nodes_as_ranks_are_one_exchange(nodes):
    moe = MoEConfig(a2a_groups=nodes)
    assert a2a_stages(moe, EXPERTS, 8, 64) == a2a_stages(MoEConfig(), EXPERTS, 8, 64)
