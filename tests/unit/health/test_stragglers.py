"""Which process is slow. tests/nightly/faults/test_supervisor.py compares two real ones."""

import pytest

from tests.clock import Clock
from tests.faults.tiny import config as TINY
from ultrascale_jax.health.stragglers import StragglerCheck, stragglers
from ultrascale_jax.hooks import Run
from ultrascale_jax.launch.distributed import StopRequest
from ultrascale_jax.launch.events import Events, read_events
from ultrascale_jax.launch.watchdog import Watch
from ultrascale_jax.sharding.mesh import make_mesh


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


def no_batches():
    yield from ()


def test_what_a_process_waits_for_its_devices_is_not_its_own(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    events, check = Events(tmp_path, 0), StragglerCheck(3)
    run = Run(
        TINY,
        make_mesh(TINY.mesh.resolve(8)),
        None,
        step=0,
        batches=no_batches(),
        events=events,
        watch=Watch(events),
        note=print,
        stop=StopRequest(),
        started=0.0,
    )
    check.on_start(run)
    run.step = 1
    clock.sleep(0.5)
    with run.waiting_for_devices():
        clock.sleep(2.0)
    check.after_step(run)
    clock.sleep(30.0)
    check.on_resume(run)
    run.step = 2
    clock.sleep(1.0)
    check.after_step(run)
    assert (check.steps, check.own) == ([2.5, 1.0], [0.5, 1.0])
    run.step = 3
    check.after_step(run)
    assert check.steps == []
    # One process has nobody to be compared with.
    assert read_events(tmp_path) == []
