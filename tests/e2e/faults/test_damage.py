"""A kill in a save leaves a checkpoint that loads; damaged data are refused. tests/nightly/faults has more of both."""

import random

from tests.faults.saver import check_newest


def test_a_kill_at_any_moment_of_a_save_leaves_a_newest_that_loads_bit_for_bit(tmp_path, killed):
    """Row 7. Random delays, spread over several saves, in one folder."""
    rng, newest = random.Random(7), []
    for _ in range(3):
        killed(tmp_path, rng.uniform(0, 0.4), 3)
        newest.append(check_newest(tmp_path, 3))
    assert 0 < newest[0] < newest[1] < newest[2]
