"""A model of own layers trains on any mesh as on one device."""

import functools

import pytest

from tests.own_layers import OwnModel
from tests.parity.test_meshes import BASE
from tests.runs import change
from tests.states import some_state
from ultrascale_jax.config import MeshConfig

START = functools.partial(some_state, model=OwnModel)
WIDE = pytest.mark.wide  # the first row, and those of `rows.py`, imply these


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, train",
    [
        ("pp=2,fsdp=2,sp=2", {"remat": "selective"}),
        pytest.param("fsdp=2,cp=2,sp=2", {}, marks=WIDE),
        pytest.param("fsdp=2,ep=2,sp=2", {"remat": "full"}, marks=WIDE),
        pytest.param("dp=2,fsdp=2,tp=2", {"zero": 2, "remat": "selective"}, marks=WIDE),
        pytest.param("pp=2,cp=2,tp=2", {"zero": 1}, marks=WIDE),
        pytest.param("pp=2,fsdp=2,dp=2", {"zero": 2}, marks=WIDE),
    ],
)
def test_own_layers_and_an_own_head_train_as_on_one_device(mesh, train, assert_equals_one_device):
    cfg = change(BASE, train={"steps": 2, **train})
    cfg = change(cfg, model={"num_kv_heads": 4}, mesh=MeshConfig.parse(mesh).sizes).check(8)
    assert_equals_one_device(cfg, evaluates=True, start=START)
