"""Fewer layers than stages: the stages without a layer hand on what they get."""

from tests.parity.comparison import compare
from tests.parity.rows import BASE
from tests.runs import change


def test_stages_without_a_layer_change_no_number():
    """Five layers on 8 stages of four ranks."""
    pp = {"schedule": "zb_v"}
    cfg = change(BASE, mesh={"pp": 4, "fsdp": 2}, pp=pp, train={"microbatches": 8, "steps": 1})
    compare(cfg, seeds=(0,))
