"""The step of every recipe, and of every pipeline, has the right shapes, types and shardings on 4,096 GPUs."""

import dataclasses

import pytest

from tests.recipe_steps import NUM_DEVICES, PIPELINES, RECIPES, check_step, in_a_pipeline, on_4096
from ultrascale_jax.config import MeshConfig


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_step_of_each_recipe_returns_the_state_that_it_takes(name):
    check_step(on_4096(RECIPES[name]))


@pytest.mark.parametrize("name", PIPELINES)
def test_the_step_of_a_pipeline_returns_the_state_that_it_takes(name):
    check_step(in_a_pipeline(name))


def test_the_step_of_deepseek_v3_with_its_module_in_fp8_returns_the_state_that_it_takes():
    cfg = RECIPES["deepseek_v3"]
    model = dataclasses.replace(cfg.model, mtp_layers=1)
    batch = {"microbatches": 2, "global_batch": 2048}
    train = dataclasses.replace(cfg.train, zero=3, precision="fp8", **batch)
    mesh = MeshConfig.of(dp=2, fsdp=4, ep=64, cp=2, sp=4)
    cfg = dataclasses.replace(cfg, model=model, train=train, mesh=mesh).check(NUM_DEVICES)
    check_step(cfg)
