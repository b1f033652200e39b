"""What the soak's verdict makes of the faults that struck and of what the run says of them."""

import pytest

from scripts import soak

FLIP = soak.Strike(10.0, soak.FLIP, 45, "", flipped=40)


def event(time, kind, **details):
    return {"time": time, "kind": kind, **details}


def resumed(time, step):
    """A start, and the first section of its steps."""
    names = ("restore", "start", "warm-up")
    sections = [event(time + 0.1, "section", rank=0, name=name, step=step) for name in names]
    return [event(time, "start", rank=0), *sections]


@pytest.mark.parametrize(
    ("events", "missed", "sound"),
    [
        ([event(11.0, "quarantined", step=40), *resumed(10.5, 20)], [], []),
        (resumed(11.0, 60), [], []),
        (resumed(11.0, 40), [40], []),
        (resumed(11.0, 20), [40], []),
        ([event(11.0, "quarantined", step=60), *resumed(10.5, 20)], [40], [60]),
        # It ended before it was started again.
        (resumed(1.0, 20), [], []),
    ],
)
def test_a_flipped_checkpoint_is_put_aside_unless_a_newer_one_was_used(events, missed, sound):
    events = [event | {"step": event.get("step", 0)} for event in events]
    assert soak.unfound([FLIP], events) == (missed, sound)


def test_a_save_is_due_where_its_step_was_done_while_the_disk_was_full():
    full = soak.Strike(20.0, soak.FULL, 100, "")
    rows = [{"step": step, "time": step / 5.0} for step in range(80, 110)]
    assert soak.saves_due([full, FLIP], rows, 20) == 1
    assert soak.saves_due([full], rows, 50) == 0
