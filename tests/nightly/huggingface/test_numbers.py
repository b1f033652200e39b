"""Every family has the logits, losses and gradients of `transformers`, on one device and on a mesh."""

import csv

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.hf_numbers import check_gradients, check_steps
from tests.paths import CARDS, HF
from ultrascale_jax.huggingface import families
from ultrascale_jax.huggingface.wrappers import TEXTS

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


def test_every_family_has_a_card_and_all_tensors_come_back():
    """The rows are by `python -m tests.cards`."""
    with CARDS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row.pop("checkpoint") for row in rows) == FAMILIES
    assert {row.pop("family") for row in rows} == {*families.FAMILIES}
    for row in rows:
        equal, every = row.pop("tensors that come back").split(" of ")
        assert equal == every, row
        assert all(float(share) < 1e-4 for share in row.values()), row


@pytest.mark.parametrize("name", TEXTS)
def test_absent_keys_of_a_text_model_mean_what_they_do_in_transformers(name):
    made, keys = CONFIG_MAPPING[name](), TEXTS[name].defaults
    rope = dict(made.rope_parameters)
    for key, value in keys.items():
        assert value == (rope[key] if key == "rope_theta" else getattr(made, key)), key
