"""Recipes, cut small, train alike with and without the rules of lowering: one here, and the others by night."""

import pytest

from tests.parity.rows import ROWS
from tests.recipe_steps import RECIPES
from tests.small_recipes import BY_DAY, RUNS, compare_with_plain, rules_of


def test_only_recipes_for_one_gpu_or_without_zero_have_no_rule():
    with_rules = {recipe for names in RUNS for recipe in names.split(",")}
    assert set(RECIPES) - with_rules == {"gpt_peer", "smollm2_135m"}


def test_each_rule_of_a_recipe_is_in_a_row_of_parity_or_in_a_recipe_of_the_day():
    by_day = (row.config for row in ROWS), (RUNS[names] for names in BY_DAY)
    rules = set().union(*(rules_of(cfg) for cfgs in by_day for cfg in cfgs))
    assert set().union(*map(rules_of, RUNS.values())) <= rules


@pytest.mark.parametrize("names", BY_DAY)
def test_no_rule_of_lowering_changes_losses_or_gradients(names, tmp_path):
    compare_with_plain(names, tmp_path)
