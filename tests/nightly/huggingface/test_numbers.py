"""Every family has the logits, losses and gradients of `transformers`, on one device and on a mesh."""

import pytest

from tests.hf_numbers import check_gradients, check_steps
from tests.paths import HF

FAMILIES = sorted(folder.name for folder in HF.iterdir())
MESHES = ["dp=1", "fsdp=2,sp=2,tp=2"]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradients_are_those_of_transformers(family, mesh):
    check_gradients(family, mesh)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_four_adamw_steps_lose_what_they_lose_in_torch(family, mesh):
    check_steps(family, mesh)
