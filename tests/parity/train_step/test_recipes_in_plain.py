"""Recipes, cut small, train alike with and without the rules of lowering: three here, and the others by night."""

import pytest

from tests.recipe_steps import RECIPES
from tests.small_recipes import BY_DAY, RUNS, compare_with_plain


def test_only_recipes_for_one_gpu_or_without_zero_have_no_rule():
    with_rules = {recipe for names in RUNS for recipe in names.split(",")}
    assert set(RECIPES) - with_rules == {"gpt_peer", "smollm2_135m"}


@pytest.mark.parametrize("names", BY_DAY)
def test_no_rule_of_lowering_changes_losses_or_gradients(names, tmp_path):
    compare_with_plain(names, tmp_path)
