"""A model of own layers and terms trains in a pipeline as on one device; by night with experts, on other meshes."""

from tests.parity.own_layers import compare_own_model


def test_own_layers_and_an_own_head_train_as_on_one_device():
    compare_own_model("pp=2,sp=2", {"remat": "selective"}, evaluates=False)
