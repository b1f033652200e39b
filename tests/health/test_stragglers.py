"""Two real processes are compared in tests/faults/test_supervisor.py."""

import time

import numpy as np
import pytest

from ultrascale_jax.health.stragglers import StepTimes, stragglers, summary
from ultrascale_jax.launch.events import Events, read_events


@pytest.mark.parametrize(
    ("own", "found"),
    [
        ([0.01, 0.01, 0.30, 0.02], [2]),
        ([0.01, 0.40, 0.30, 0.02], [1, 2]),
        ([0.01, 0.01, 0.09, 0.02], []),
        ([0.30, 0.30, 0.30, 0.31], []),
        ([0.01, 0.50], [1]),
        ([0.50], []),
    ],
)
def test_a_straggler_has_much_more_time_of_its_own_than_the_others(own, found):
    assert stragglers([1.0] * len(own), own) == found


def test_of_a_time_mean_and_percentiles_are_told():
    steps = [1.0] * 9 + [2.0]
    values = summary(steps, [0.0] * 10)
    assert values["step_mean_s"] == pytest.approx(1.1) and values["step_p50_s"] == 1.0
    assert values["step_p99_s"] == pytest.approx(np.percentile(steps, 99))
    assert values["own_mean_s"] == 0.0


def test_what_a_process_waits_for_its_devices_is_not_its_own(tmp_path):
    times = StepTimes(3, Events(tmp_path, 0), print)
    with times.waiting():
        time.sleep(0.2)
    times.step(1)
    time.sleep(0.2)
    times.restart()
    times.step(2)
    assert times.steps[0] >= 0.2 > times.own[0] and times.steps[1] < 0.2
    times.step(3)
    assert times.steps == []
    # One process has nobody to be compared with.
    assert read_events(tmp_path) == []
