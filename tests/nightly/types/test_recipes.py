"""The step of every recipe, and of every pipeline, has the right shapes, types and shardings on 4,096 GPUs."""

import pytest

from tests.recipe_steps import PIPELINES, RECIPES, check_step, in_a_pipeline, on_4096


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_step_of_each_recipe_returns_the_state_that_it_takes(name):
    check_step(on_4096(RECIPES[name]))


@pytest.mark.parametrize("name", PIPELINES)
def test_the_step_of_a_pipeline_returns_the_state_that_it_takes(name):
    check_step(in_a_pipeline(name))
