"""Logits, losses and gradients on a mesh equal what `transformers` computed; every family stands in tests/nightly."""

import pytest

from tests.hf_numbers import check_gradients, check_logits, check_steps

# A tensor group of four is larger than the two kv heads: they are replicated.
MESH = "fsdp=2,sp=2,tp=2"


# What these lack is read from config.json (tests/unit/huggingface/test_config.py).
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "llama3"])
def test_loss_and_gradients_are_those_of_transformers(family):
    check_gradients(family, MESH, with_logits=family == "llama3")


def test_logits_of_latent_attention_and_experts_are_those_of_transformers():
    check_logits("deepseek_v3", MESH)


def test_four_adamw_steps_lose_what_they_lose_in_torch():
    check_steps("qwen3", MESH)
