"""Without any decision about speed (`train.lowering=plain`) a run's losses and gradients are those of one device too.

`test_meshes.py` and `test_pipelines.py` prove the same with the decisions.
"""

import pytest

from tests.parity import test_meshes, test_pipelines
from tests.runs import change

SLOW = {"fsdp2_sp2_tp2_qwen3", "dp2_fsdp4_one_micro_batch"}
"""Rows of `make test`: what the rules gather ahead, delay, sum by layer and keep."""


def marked(name: str):
    return pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.wide)


@pytest.mark.parametrize("name", [marked(name) for name in test_meshes.TABLE])
def test_plain_lowering_on_a_mesh_equals_one_device(name, assert_equals_one_device, pairs):
    cfg = change(test_meshes.configure(*test_meshes.TABLE[name]), train={"lowering": "plain"})
    if cfg.train.dpo.enabled:
        cfg = change(cfg, data={"source": pairs})
    assert_equals_one_device(cfg, evaluates=False)


@pytest.mark.wide
@pytest.mark.parametrize("name", list(test_pipelines.TABLE))
def test_plain_lowering_in_a_pipeline_equals_one_device(name, assert_equals_one_device):
    cfg = change(test_pipelines.configure(*test_pipelines.TABLE[name]), train={"lowering": "plain"})
    assert_equals_one_device(cfg, evaluates=False)
