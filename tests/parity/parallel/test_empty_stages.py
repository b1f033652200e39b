"""Fewer layers than stages: the stages without a layer hand on what they get."""

import pytest

from tests.parity.comparison import compare
from tests.parity.rows import BASE
from tests.runs import change


@pytest.mark.parametrize(("schedule", "virtual"), [("interleaved", 4), ("zb_v", 2)])
def test_stages_without_a_layer_change_no_number(schedule, virtual):
    """Five layers on 16 or 8 stages of four ranks."""
    pp = {"schedule": schedule, "virtual": virtual}
    cfg = change(BASE, mesh={"pp": 4, "fsdp": 2}, pp=pp, train={"microbatches": 8, "steps": 1})
    compare(cfg, seeds=(0,))
