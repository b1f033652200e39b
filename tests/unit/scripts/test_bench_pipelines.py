"""The benchmark of bubbles sleeps as often as the table says, and says why a schedule is left out."""

import pytest

from scripts.bench_pipelines import Options, measure, rows
from ultrascale_jax.config import UserError
from ultrascale_jax.parallel.pipeline.schedules import build
from ultrascale_jax.parallel.pipeline.table import KINDS
from ultrascale_jax.plan.schedules.measures import bubble


def test_in_lock_step_every_rank_sleeps_as_long_as_the_table_says():
    schedule = build("zb_h1", 2, 4)
    row = measure(schedule, 0.001)
    work = schedule.microbatches * schedule.virtual * len(KINDS)
    for naps in row["naps"]:
        assert sum(naps.values()) / work - 1 == pytest.approx(row["table_bubble"])
    assert row["table_bubble"] == bubble(schedule)


def test_a_schedule_that_does_not_exist_has_its_reason():
    by_name = dict(rows(8, 4))
    assert "must be at least 8" in str(by_name["interleaved"])
    assert not isinstance(by_name["zb_v, v 2"], str)
    with pytest.raises(UserError, match=r"ranks=\(4, 1\): must be at least 2"):
        Options(ranks=(4, 1))
