"""Models of own layers, terms and optimizers train on a mesh as on one device."""

from tests.parity.own_layers import compare_own_attention, compare_own_model


def test_own_layers_and_an_own_head_train_as_on_one_device():
    compare_own_model("pp=2,sp=2", {"remat": "selective"})


def test_layers_with_and_without_experts_and_an_own_optimizer_train_as_on_one_device():
    compare_own_attention("pp=2,ep=2")
