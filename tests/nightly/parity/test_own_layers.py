"""Own layers and own optimizers on more meshes train as on one device."""

import pytest

from tests.parity.own_layers import (
    Frozen,
    Lion,
    compare_model,
    compare_own_attention,
    compare_own_model,
)
from tests.parity.rows import BASE
from tests.runs import change, run


@pytest.mark.parametrize(
    "mesh, train, schedule",
    [
        ("fsdp=4,tp=2", {"remat": "full", "microbatches": 2}, "1f1b"),
        ("fsdp=2,cp=2,sp=2", {}, "1f1b"),
        ("dp=2,fsdp=2,tp=2", {"zero": 2, "remat": "selective"}, "1f1b"),
        ("pp=2,fsdp=2,sp=2", {}, "interleaved"),
        ("pp=2,fsdp=2,dp=2", {"zero": 2}, "1f1b"),
    ],
)
def test_own_layers_and_an_own_head_train_as_on_one_device(mesh, train, schedule):
    compare_own_model(mesh, train, schedule)


@pytest.mark.parametrize("mesh", ["fsdp=2,ep=2,cp=2", "pp=2,ep=2"])
def test_terms_of_layers_with_and_without_experts_are_those_of_one_device(mesh):
    compare_own_attention(mesh)


@pytest.mark.parametrize(
    ("model", "mesh", "train"),
    [
        (Lion, "dp=2,fsdp=2,cp=2", {"zero": 2}),
        (Frozen, "fsdp=4,tp=2", {"microbatches": 1}),
    ],
)
def test_an_own_optimizer_trains_as_on_one_device(model, mesh, train):
    compare_model(model, mesh, train=train)


def test_a_run_with_an_own_optimizer_resumes_from_its_checkpoint(tmp_path):
    cfg = change(BASE, train={"steps": 4}, mesh={"fsdp": 2, "tp": 2})
    whole = run(cfg, tmp_path / "whole", model=Lion)
    first = change(cfg, train={"steps": 2}, checkpoint={"every": 2})
    run(first, tmp_path / "parts", model=Lion)
    assert run(cfg, tmp_path / "parts", model=Lion)["loss"] == whole["loss"]
