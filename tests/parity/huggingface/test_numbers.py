"""Logits of every family, and losses and gradients of some on a mesh, equal what `transformers` computed."""

import pytest

from tests.hf_numbers import check_gradients, check_logits, check_steps
from tests.paths import HF

# A tensor group of four is larger than the two kv heads: they are replicated.
MESH = "fsdp=2,sp=2,tp=2"


# All families: tests/nightly/huggingface/test_numbers.py.
@pytest.mark.parametrize("family", ["gemma3", "llama3"])
def test_loss_and_gradients_are_those_of_transformers(family):
    check_gradients(family, MESH, with_logits=family == "llama3")


@pytest.mark.parametrize("family", sorted(folder.name for folder in HF.iterdir()))
def test_logits_are_those_of_transformers(family):
    check_logits(family, MESH if family == "deepseek_v3" else "dp=1")


def test_four_adamw_steps_lose_what_they_lose_in_torch():
    check_steps("qwen3", MESH)
