"""The list scheduler keeps to its memory, loses to no known schedule and finds the published optimum."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale_jax.config import UserError
from ultrascale_jax.parallel.pipeline.schedules import build
from ultrascale_jax.parallel.pipeline.table import Schedule
from ultrascale_jax.plan.schedules.from_costs import from_costs
from ultrascale_jax.plan.schedules.measures import bubble, held

COSTS = ((1, 1, 1), (1, 1.2, 0.8), (1, 1.5, 0.7), (1, 2, 1))


def capped_1f1b(p, m, cap):
    """1F1B with at most `cap` microbatches in flight: its operations in order, each in a tick of its own."""
    most = [min(cap, p - rank) for rank in range(p)]
    orders = [
        [("F", i) for i in range(min(m, most[rank]))]
        + [op for i in range(m) for op in (("B", i), ("F", i + most[rank])) if op[1] < m]
        for rank in range(p)
    ]
    done, ticks = {}, []
    while any(orders):
        row = []
        for rank, order in enumerate(orders):
            kind, i = order[0] if order else (None, 0)
            needs = [("F", i, rank - 1)] if kind == "F" and rank else []
            if kind == "B":
                needs = [("F", i, rank)] + [("B", i, rank + 1)] * (rank < p - 1)
            runs = kind and all(done.get(need, len(ticks)) < len(ticks) for need in needs)
            row.append({kind: (i, rank)} if runs else {})
        for rank, cell in enumerate(row):
            for kind, job in cell.items():
                orders[rank].pop(0)
                done[kind, *job] = len(ticks)
        ticks.append(row)
    return Schedule(name="capped", ranks=p, microbatches=m).with_ticks(ticks).check()


@given(
    p=st.integers(1, 5),
    v=st.integers(1, 3),
    m=st.integers(1, 10),
    spare=st.integers(0, 12),
    cost=st.tuples(*[st.floats(0.05, 20)] * 3),
)
@settings(max_examples=40)
def test_tables_for_any_costs_are_legal_and_keep_to_the_memory(p, v, m, spare, cost):
    cap = v + spare
    schedule = from_costs(p, m, *cost, cap, virtual=v)
    assert schedule.check() is schedule
    assert max(held(schedule)) <= cap
    assert schedule.num_stages == p * v
    assert schedule.name == "from_costs"


@pytest.mark.parametrize("p, m", [(2, 4), (4, 11)])
def test_it_is_never_worse_than_1f1b_in_the_same_memory(p, m):
    for cap in range(1, 2 * p + 2):
        plain = capped_1f1b(p, m, cap)
        for cost in COSTS:
            share = bubble(from_costs(p, m, *cost, cap), *cost)
            assert share <= bubble(plain, *cost) + 1e-9, (cap, cost)
            if cap >= min(m, 2 * p):
                whole = bubble(build("1f1b", p, m), *cost)
                assert share <= whole + 1e-9, (cap, cost)


@pytest.mark.parametrize(
    "name, virtual", [("zb_uniform", 1), ("zb_h1", 1), ("interleaved", 2), ("zb_uniform", 3)]
)
def test_it_is_never_worse_than_a_named_schedule_in_the_same_memory(name, virtual):
    schedule = build(name, 4, 8, 0 if name == "zb_h1" else virtual)
    for cost in COSTS:
        made = from_costs(4, 8, *cost, max(held(schedule)), virtual=virtual)
        assert bubble(made, *cost) <= bubble(schedule, *cost) + 1e-9, cost


def test_more_memory_is_never_worse():
    for cost in COSTS:
        bubbles = [bubble(from_costs(4, 12, *cost, cap), *cost) for cap in (1, 2, 4, 8)]
        assert bubbles == sorted(bubbles, reverse=True)


def test_lock_step_with_the_memory_for_it_is_zb_uniform():
    assert from_costs(4, 8, 1, 1.2, 0.8, 8).ticks == build("zb_uniform", 4, 8).ticks


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 8, 1, 1, 1, 4), "mesh.pp=0: must be at least 1"),
        ((4, 8, 0, 1, 1, 4), "f=0: must be a positive time"),
        ((4, 8, 1, float("nan"), 1, 4), "b=nan: must be a positive time"),
        ((4, 8, 1, 1, 1, 0), "memory_cap=0: must be at least 1"),
    ],
)
def test_what_makes_no_schedule_is_refused(arguments, message):
    with pytest.raises(UserError) as error:
        from_costs(*arguments)
    assert str(error.value).startswith(message)


def test_chunks_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="memory_cap=2: must be at least 3"):
        from_costs(4, 8, 1, 1, 1, 2, virtual=3)
