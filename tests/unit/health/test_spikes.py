"""The rule for a spike: a step that leaps above the window of accepted ones."""

import jax
import numpy as np
import pytest

from tests.faults.tiny import config as TINY
from tests.runs import change, mesh_of
from ultrascale_jax.config import WatchConfig
from ultrascale_jax.train_step.spikes import Spikes
from ultrascale_jax.train_step.state import abstract_state


def spiky(window, sigma, values):
    """The rule as a loop over the accepted steps."""
    accepted, skipped = [], []
    for value in values:
        recent = np.array(accepted[-window:], np.float32)
        full = len(accepted) >= window
        leaps = full and bool((value > recent.mean(0) + sigma * recent.std(0)).any())
        skipped.append(leaps)
        accepted += [] if leaps else [value]
    return skipped


@pytest.mark.parametrize(("window", "sigma"), [(4, 3.0), (16, 2.5)])
def test_a_step_is_skipped_when_it_leaps_above_the_window_of_accepted_ones(window, sigma):
    values = np.random.default_rng(window).normal(size=(200, 2)).astype(np.float32)
    values[::17] += 20.0
    values[30:60, 1] += 1.0
    spikes = Spikes.start(WatchConfig(spike_sigma=sigma, spike_window=window))

    @jax.jit
    def step(spikes, value):
        leaps = spikes.is_spike(*value, sigma)
        return spikes.after(~leaps, *value), leaps

    skipped = []
    for value in values:
        spikes, leaps = step(spikes, value)
        skipped.append(bool(leaps))
    assert skipped == spiky(window, sigma, values)
    assert not any(skipped[:window]) and 10 < sum(skipped) < 150


def test_without_a_threshold_the_state_holds_no_window():
    cfg = change(TINY, mesh={"fsdp": 1}, watch={"spike_sigma": 0.0, "spike_window": 4})
    assert Spikes.start(cfg.watch) is None
    assert abstract_state(cfg, mesh_of(cfg)).spikes is None
