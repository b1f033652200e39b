"""The interval between saves is the minimum of the time that a run with failures takes."""

import math
import random

import pytest

from ultrascale_jax.plan.failures import Failures


def simulated_s(failures: Failures, interval_s: float, intervals: int, seed: int) -> float:
    """Seconds in which so many intervals are computed and saved, with failures drawn at random."""
    draw = random.Random(seed)

    def next_failure():
        return draw.expovariate(1 / failures.mean_s)

    now, until_failure = 0.0, next_failure()
    for _ in range(intervals):
        left = interval_s + failures.save_s
        while until_failure < left:
            now += until_failure
            left, until_failure = interval_s + failures.save_s, next_failure()
            while until_failure < failures.restart_s:
                now += until_failure
                until_failure = next_failure()
            now, until_failure = now + failures.restart_s, until_failure - failures.restart_s
        now, until_failure = now + left, until_failure - left
    return now


@pytest.mark.parametrize(("mean_s", "save_s"), [(3600, 20), (1200, 400)])
def test_goodput_is_that_of_a_simulated_run(mean_s, save_s):
    failures = Failures(mean_s=mean_s, restart_s=300, save_s=save_s)
    for interval_s in (120, 600, 2400):
        took = simulated_s(failures, interval_s, 40_000, seed=1)
        assert failures.goodput(interval_s) == pytest.approx(40_000 * interval_s / took, rel=0.01)


@pytest.mark.parametrize("mean_s", [1.0, 300.0, 3e4, 1e8])
@pytest.mark.parametrize("save_s", [0.01, 20.0, 4000.0])
def test_no_other_interval_is_better(mean_s, save_s):
    failures = Failures(mean_s=mean_s, restart_s=100, save_s=save_s)
    best = failures.best_interval_s
    highest = failures.goodput(best)
    for factor in (0.5, 0.9, 0.999, 1.001, 1.1, 2.0):
        assert failures.goodput(factor * best) <= highest * (1 + 1e-12)


def test_a_save_that_is_written_for_long_is_lost_longer_and_not_begun_before_it_ends():
    quick = Failures(mean_s=1e4, restart_s=100, save_s=1)
    slow = Failures(mean_s=1e4, restart_s=100, save_s=1, write_s=500)
    assert quick.best_interval_s < 500 == slow.best_interval_s
    assert slow.goodput(500) == pytest.approx(quick.goodput(500) * math.exp(-0.05))
