"""A model of own layers, with terms of its loss and of its layers, trains on any mesh as on one device."""

import functools
from typing import ClassVar

import pytest

import ultrascale_jax as us
from tests.own_layers import GatedAttention, OwnModel
from tests.parity.test_meshes import BASE
from tests.runs import change
from tests.states import some_state
from ultrascale_jax.config import MeshConfig

START = functools.partial(some_state, model=OwnModel)
WIDE = pytest.mark.wide  # the first row, and those of `rows.py`, imply these


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, train, schedule",
    [
        ("pp=2,fsdp=2,sp=2", {"remat": "selective"}, "zb_uniform"),
        ("fsdp=4,tp=2", {"remat": "full", "microbatches": 2}, "1f1b"),
        pytest.param("fsdp=2,cp=2,sp=2", {}, "1f1b", marks=WIDE),
        pytest.param("fsdp=2,ep=2,sp=2", {"remat": "full"}, "1f1b", marks=WIDE),
        pytest.param("dp=2,fsdp=2,tp=2", {"zero": 2, "remat": "selective"}, "1f1b", marks=WIDE),
        pytest.param("pp=2,fsdp=2,sp=2", {"remat": "full"}, "1f1b", marks=WIDE),
        pytest.param("pp=2,fsdp=2,sp=2", {}, "interleaved", marks=WIDE),
        pytest.param("pp=2,cp=2,tp=2", {"zero": 1}, "1f1b", marks=WIDE),
        pytest.param("pp=2,fsdp=2,dp=2", {"zero": 2}, "1f1b", marks=WIDE),
    ],
)
def test_own_layers_and_an_own_head_train_as_on_one_device(
    mesh, train, schedule, assert_equals_one_device
):
    cfg = change(BASE, train={"steps": 2, **train}, pp={"schedule": schedule})
    sizes, model = MeshConfig.parse(mesh).sizes, {"num_kv_heads": 4, "num_layers": 4}
    cfg = change(cfg, model=model, mesh=sizes).check(8)
    assert_equals_one_device(cfg, evaluates=True, start=START)


class OwnAttention(us.Transformer):
    layers = us.Layers(attention=GatedAttention)
    layer_terms: ClassVar = {"open_gates": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp=2,fsdp=2,ep=2", pytest.param("fsdp=2,ep=2,cp=2", marks=WIDE)])
def test_terms_of_layers_with_and_without_experts_are_those_of_one_device(
    mesh, assert_equals_one_device
):
    experts = us.Experts(num=4, top_k=2, d_ff=32, dense_layers=1)
    cfg = change(BASE, model={"num_layers": 4, "experts": experts}, train={"steps": 2})
    cfg = change(cfg, mesh=MeshConfig.parse(mesh).sizes).check(8)
    assert_equals_one_device(cfg, start=functools.partial(some_state, model=OwnAttention))
