"""The benchmark of bubbles sleeps as often as the table says."""

import pytest

from scripts.bench.pipelines import timed
from ultrascale_jax.parallel.pipeline.schedules import build
from ultrascale_jax.parallel.pipeline.table import KINDS
from ultrascale_jax.plan.schedules.measures import bubble


def test_in_lock_step_every_rank_sleeps_as_long_as_the_table_says():
    schedule = build("zb_h1", 2, 4)
    row = timed(schedule, 0.001)
    work = schedule.microbatches * schedule.virtual * len(KINDS)
    for naps in row["naps"]:
        assert sum(naps.values()) / work - 1 == pytest.approx(row["table_bubble"])
    assert row["table_bubble"] == bubble(schedule)
