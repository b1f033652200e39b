"""Schedules are legal, their bubbles and peaks are those of the literature, and tables that cannot run are refused."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale_jax.config import (
    UserError,
)
from ultrascale_jax.parallel.pipeline.orders import forward_only
from ultrascale_jax.parallel.pipeline.schedules import (
    build,
    layer_order,
    stack_orders,
    stage_layers,
)
from ultrascale_jax.parallel.pipeline.table import Schedule, ScheduleError
from ultrascale_jax.plan.schedules.measures import (
    bubble,
    formula,
    held,
    in_flight,
    timeline,
)
from ultrascale_jax.plan.schedules.text import as_text

RANKS = (2, 3, 4, 7, 12)
"""Odd, even, a power of 2 and none, few and many: the rules ask no more of a number of ranks."""

ANY_MICROBATCHES = ("afab", "1f1b", "zb_uniform", "zb_h1", "zb_v")
COSTS = ((1, 1, 1), (1, 1.2, 0.8), (1, 1.5, 0.7), (1, 2, 1))
approx = pytest.approx


def atomic_bubble(schedule, f, b, w, both):
    """Idle time of the last rank where the operations of a cell start and end together; F with B takes `both`.

    Costs are those of one chunk, as in DualPipe's table; both directions of a chunk overlap there.
    """
    cost = {"F": f, "B": b, "W": w}
    free, busy = [0.0] * schedule.ranks, [0.0] * schedule.ranks
    end = {}
    for row in schedule.ticks:
        for rank, cell in enumerate(row):
            needs = [("F", i, s - 1) for i, s in [cell.get("F", (0, 0))] if s > 0]
            if "B" in cell:
                i, s = cell["B"]
                needs += [("F", i, s)] + [("B", i, s + 1)] * (s + 1 < schedule.num_stages)
            took = both if {"F", "B"} <= set(cell) else sum(cost[kind] for kind in cell)
            free[rank] = max([free[rank], *(end[need] for need in needs)]) + took
            busy[rank] += took
            end |= {(kind, *job): free[rank] for kind, job in cell.items()}
    return max(free) - busy[-1]


@pytest.mark.parametrize("p", [1, *RANKS])
def test_every_schedule_is_legal_for_any_number_of_microbatches_that_it_allows(p):
    for m in {1, 2, p - 1, p, p + 1, 2 * p - 1, 2 * p, 3 * p, 5 * p + 2} - {0}:
        for name in ANY_MICROBATCHES:
            build(name, p, m)
        if m >= 2 * p:
            build("dualpipe_v", p, m)
        for v, name in itertools.product((2, 3, 4), ("interleaved", "zb_uniform")):
            if m >= p:
                build(name, p, m, v)
            if m % p == 0:
                build(name, p, m, v, group=m)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("name", ["afab", "1f1b"])
def test_afab_and_1f1b_idle_p_minus_1_over_m(name, p):
    for m in (1, p - 1, p, 2 * p + 1, 8 * p):
        schedule = build(name, p, m)
        assert formula(schedule) == approx((p - 1) / m)
        for runtime, cost in itertools.product(("lockstep", "dependencies"), COSTS):
            assert bubble(schedule, *cost, runtime) == approx((p - 1) / m), (m, runtime, cost)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaving_divides_the_bubble_by_v_whatever_the_group(p, v):
    whole = (p, p), (2 * p, p), (4 * p, 2 * p), (8 * p, 8 * p)
    for m, group in (*whole, (p + 1, 0), (3 * p - 1, 0), (5 * p + 2, 0)):
        schedule = build("interleaved", p, m, v, group)
        assert formula(schedule) == approx((p - 1) / (v * m))
        for runtime in ("lockstep", "dependencies"):
            assert bubble(schedule, 1, 1.2, 0.8, runtime) == approx((p - 1) / (v * m)), (m, group)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("v", [1, 2, 4])
def test_zb_uniform_idles_for_f_and_b_alone_in_lock_step(p, v):
    for m, (f, b, w) in itertools.product((2 * p, 8 * p), COSTS):
        schedule = build("zb_uniform", p, m, v)
        ideal = v * m * (f + b + w)
        assert bubble(schedule, f, b, w) == approx((p - 1) * (f + b) / ideal)
        assert bubble(schedule, f, b, w, "dependencies") == approx((p - 1) * (f + b - w) / ideal)
    assert formula(schedule) == approx(bubble(schedule))


@pytest.mark.parametrize("p", RANKS)
def test_zb_h1_idles_as_published(p):
    """(p - 1) (T_F + T_B - T_W), table 2 of arXiv 2401.10241."""
    for m, (f, b, w) in itertools.product((p, p + 1, 8 * p), COSTS):
        schedule = build("zb_h1", p, m)
        wanted = (p - 1) * (f + b - w) / (m * (f + b + w))
        assert bubble(schedule, f, b, w, "dependencies") == approx(wanted)
    assert formula(schedule) == approx(bubble(schedule, runtime="dependencies"))


@pytest.mark.parametrize("p", RANKS)
def test_zb_v_never_idles_once_a_rank_has_begun(p):
    """Zero bubble at equal costs (arXiv 2401.10241, section 6), so the step waits for the last rank's start alone."""
    for m in (2 * p - 1, 2 * p, 8 * p):
        schedule = build("zb_v", p, m)
        times = timeline(schedule)
        for rank in range(p):
            own = [op for op in times if op.rank == rank]
            assert own[-1].end - own[0].start == approx(3 * m)
        assert bubble(schedule, runtime="dependencies") == approx((p - 1) / (6 * m))
        assert formula(schedule) == approx((p - 1) / (6 * m))


@pytest.mark.parametrize("p", RANKS)
def test_dualpipe_v_idles_as_published(p):
    """(PP / 2 - 1) (F&B + B - 3 W) with PP = 2 p chunks (DualPipe's README), each as long as the others."""
    for m, both in itertools.product((2 * p, 4 * p + 1), (3, 2.4)):
        schedule = build("dualpipe_v", p, m)
        published = (p - 1) * (both + 2 - 3)
        assert atomic_bubble(schedule, 1, 1, 1, both) == approx(published)
    assert formula(schedule) == approx((p - 1) * (3 + 2 - 3) / (2 * 3 * m))


@pytest.mark.parametrize(
    "name, virtual, ticks, lockstep, dependencies",
    [
        ("afab", 0, 22, 0.375, 0.375),
        ("1f1b", 0, 15, 0.375, 0.375),
        ("interleaved", 2, 27, 0.1875, 0.1875),
        ("zb_uniform", 1, 15, 0.25, 0.125),
        ("zb_uniform", 2, 27, 0.125, 0.0625),
        ("zb_h1", 0, 27, 38 / 24, 0.125),
        ("zb_v", 0, 51, 35 / 16, 0.0625),
        ("dualpipe_v", 0, 34, 13 / 24, 0.0625),
    ],
)
def test_bubbles_at_4_ranks_and_8_microbatches(name, virtual, ticks, lockstep, dependencies):
    schedule = build(name, 4, 8, virtual)
    assert len(schedule.ticks) == ticks
    assert bubble(schedule) == approx(lockstep)
    assert bubble(schedule, runtime="dependencies") == approx(dependencies)


@pytest.mark.parametrize("p", RANKS)
def test_peaks_in_flight_are_those_of_theory(p):
    for m in (1, p - 1, p, 2 * p + 1, 8 * p):
        fused = tuple(min(m, 2 * (p - rank)) for rank in range(p))
        assert in_flight(build("afab", p, m)) == (m,) * p
        assert in_flight(build("1f1b", p, m)) == fused
        assert in_flight(build("zb_uniform", p, m)) == fused
        assert in_flight(build("zb_h1", p, m)) == tuple(min(m, p - rank) for rank in range(p))
        # 1F1B's memory is that of p microbatches, here with the queue of W: ZB-H1 and ZB-V (2 p halves) keep to it.
        assert max(held(build("zb_h1", p, m))) == min(m, p)
        assert max(held(build("zb_v", p, m))) == min(2 * m, 2 * p)
    assert in_flight(build("dualpipe_v", p, 2 * p)) == (2 * p + 1,) * p


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("1f1b", 0, 8), "mesh.pp=0: must be at least 1"),
        (("interleaved", 4, 12, 2, 8), "train.microbatches=12: must be a multiple of 8"),
    ],
)
def test_numbers_for_which_there_is_no_schedule_are_refused(arguments, message):
    with pytest.raises(UserError) as error:
        build(*arguments)
    assert str(error.value).startswith(message)


def moved(schedule, changes):
    """`schedule` with the cells at (tick, rank) replaced."""
    ticks = [list(row) for row in schedule.ticks]
    for (tick, rank), cell in changes.items():
        ticks[tick][rank] = cell
    return schedule.with_ticks(ticks)


@pytest.mark.parametrize(
    "changes, entry, why",
    [
        ({(0, 0): {}}, "tick 1, rank 1, 1F0", "it needs 0F0, which is missing"),
        (
            {(0, 1): {"F": (0, 1)}, (1, 1): {}},
            "tick 0, rank 1, 1F0",
            "it needs 0F0, which runs in tick 0, for use from the next tick on",
        ),
        (
            {(1, 0): {"F": (1, 0), "B": (0, 0)}, (3, 0): {}},
            "tick 1, rank 0, 0B0",
            "it needs 1B0, which runs in tick 2, for use from the next tick on",
        ),
        ({(4, 0): {}}, "rank 0", "0B1 is missing"),
        ({(1, 0): {"F": (2, 0)}}, "tick 1, rank 0, 0F2", "there are microbatches 0 to 1 only"),
        ({(1, 0): {"F": (1, 2)}}, "tick 1, rank 0, 2F1", "there are stages 0 to 1 only"),
        ({(1, 0): {"F": (0, 1)}}, "tick 1, rank 0, 1F0", "stage 1 is on rank 1"),
        ({(1, 0): {"F": (0, 0)}}, "tick 1, rank 0, 0F0", "it has run in tick 0 already"),
        ({(1, 0): {"W": (0, 0)}}, "tick 1, rank 0", "'W' is none of its kinds F, B"),
    ],
)
def test_an_illegal_entry_is_named(changes, entry, why):
    schedule = build("1f1b", 2, 2)
    with pytest.raises(ScheduleError) as error:
        moved(schedule, changes).check()
    assert str(error.value) == f"schedule: {entry}: {why}"


def test_a_weight_gradient_waits_for_its_backward_but_may_share_its_tick():
    schedule = build("zb_uniform", 1, 2)
    assert [dict(row[0]) for row in schedule.ticks] == [
        {"F": (0, 0)},
        {"F": (1, 0), "B": (0, 0), "W": (0, 0)},
        {"B": (1, 0), "W": (1, 0)},
    ]
    early = moved(schedule, {(1, 0): {"F": (1, 0), "W": (0, 0)}, (2, 0): {"B": (0, 0)}})
    with pytest.raises(
        ScheduleError, match=r"tick 1, rank 0, 0W0: it needs 0I0, which runs in tick 2$"
    ):
        early.check()


@given(
    p=st.integers(1, 8),
    v=st.integers(1, 4),
    m=st.integers(1, 40),
    place=st.sampled_from(("loop", "v")),
)
@settings(max_examples=20)
def test_forwards_alone_are_legal_for_any_number_of_microbatches(p, v, m, place):
    schedule = forward_only(p, v, place, m)
    assert {kind for _, _, kind, _, _ in schedule.ops()} == {"F"}
    assert len(list(schedule.ops())) == p * v * m
    if place == "loop" and m % p == 0:
        assert len(schedule.ticks) == m * v + p - 1
    if place == "v" and v == 2 and m >= p:
        # The last rank has 2 m forwards after the p - 1 of the others, and the last one goes back.
        assert len(schedule.ticks) == 2 * m + 2 * (p - 1)


@given(
    p=st.integers(1, 8),
    v=st.integers(1, 4),
    more=st.integers(0, 40),
    place=st.sampled_from(("loop", "v")),
)
def test_each_layer_has_one_place_in_its_stage(p, v, more, place):
    layers, stages = p * v + more, p * v
    order = layer_order(p, v, place, layers)
    size = -(-layers // stages)
    assert len(order) == stages * size
    assert sorted(layer for layer in order if layer is not None) == list(range(layers))
    table = Schedule(name="", ranks=p, virtual=v, microbatches=1, placement=place)
    chain = []
    for stage in range(stages):
        rank, chunk = table.rank_of(stage), table.chunk_of(stage)
        assert table.stage_of(rank, chunk) == stage
        at = (rank * v + chunk) * size
        own = [layer for layer in order[at : at + size] if layer is not None]
        assert len(own) == layers // stages + (stage < layers % stages)
        chain += own
    assert chain == list(range(layers))


def test_deepseeks_dense_layers_are_spread_over_the_first_stages():
    """Three of 61: no stage gets longer, and no rank has more of them than it must."""
    assert stage_layers(16, 61, 3) == (2, *(4,) * 14, 3)
    assert stage_layers(32, 61, 3) == (1, 1, *(2,) * 29, 1)
    assert stage_layers(8, 61, 3) == stage_layers(8, 61)


@given(
    p=st.integers(1, 6),
    v=st.integers(1, 3),
    more=st.integers(0, 20),
    dense=st.integers(0, 12),
    place=st.sampled_from(("loop", "v")),
)
def test_dense_layers_have_rows_of_their_own_and_the_others_their_positions(
    p, v, more, dense, place
):
    layers = p * v + more
    sizes, alike = stage_layers(p * v, layers, dense), stage_layers(p * v, layers)
    assert sum(sizes) == layers and max(sizes) == max(alike) and min(sizes) >= 1

    def fullest(sizes):
        stops = itertools.accumulate(sizes)
        return max(
            min(dense, stop) - min(dense, stop - n) for stop, n in zip(stops, sizes, strict=True)
        )

    assert fullest(sizes) <= fullest(alike)
    order = layer_order(p, v, place, layers, dense)
    if not 0 < dense < layers:
        assert stack_orders(order, p, dense) == (order,)
        return
    first, others = stack_orders(order, p, dense)
    assert sorted(i for i in first if i is not None) == list(range(dense))
    assert others == tuple(i if i is not None and i >= dense else None for i in order)
    size, most = len(order) // p, len(first) // p
    counts = []
    for rank in range(p):
        here = [i for i in order[rank * size : (rank + 1) * size] if i is not None and i < dense]
        counts.append(len(here))
        assert first[rank * most : (rank + 1) * most] == (*here, *(None,) * (most - len(here)))
    assert most == max(counts)


def test_text_of_fused_ticks_has_a_line_for_each_kind():
    assert as_text(build("1f1b", 2, 2)).splitlines() == [
        "rank 0  F 0 1 . . .",
        "        B . . . 0 1",
        "rank 1  F . 0 1 . .",
        "        B . . 0 1 .",
    ]
