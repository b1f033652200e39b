"""The drawing of a schedule shows the time and the memory that its table has."""

import pytest

from ultrascale_jax.config import SCHEDULES
from ultrascale_jax.parallel.pipeline.schedules import build
from ultrascale_jax.plan.report.schedules import drawing
from ultrascale_jax.plan.schedules.measures import bubble, held

COSTS = 1.0, 1.5, 0.75


@pytest.mark.parametrize("runtime", ["lockstep", "dependencies"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_rank_keeps_at_most_is_what_the_table_holds(name, runtime):
    table = build(name, 4, 8)
    figure = drawing(table, COSTS, runtime)
    for rank, chunks in enumerate(held(table)):
        times, counts = figure.kept(rank)
        assert max(counts) * table.virtual == chunks
        assert counts[0] == counts[-1] == 0 and times == sorted(times)


@pytest.mark.parametrize("name", SCHEDULES)
def test_in_lock_step_the_drawing_is_as_long_as_the_executors_step(name):
    table = build(name, 4, 8)
    figure = drawing(table, COSTS)
    assert figure.width / (8 * sum(COSTS)) - 1 == pytest.approx(bubble(table, *COSTS))
    assert f"{bubble(table, *COSTS):.1%}" in figure.caption
