"""A step that is not finite is traced to a parameter, half a layer, the loss or a gradient, on any mesh."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.faults.tiny import config as TINY
from tests.runs import change, mesh_of
from tests.states import some_state
from ultrascale_jax.config import Lora
from ultrascale_jax.health.nonfinite import find_nonfinite
from ultrascale_jax.train_step.state import TrainState
from ultrascale_jax.training.setup import make_loader

TOO_LARGE = 1e38
"""A finite number in float32 whose products are not."""

PLACES = {
    "stacks.0.mlp.w_up": (np.nan, "in the parameters stacks.0.mlp.w_up, before the step"),
    "stacks.0.attn.w_v": (TOO_LARGE, "after the attention of layer 1, from 0"),
    "stacks.0.mlp.w_down": (TOO_LARGE, "after the feed-forward layer of layer 1, from 0"),
    "head": (TOO_LARGE, "in the head or the loss; each layer's output is finite"),
}
"""Value of a row of a parameter, of layer 1 in a stack, and the place that it leads to."""


def with_values(state: TrainState, values: dict[str, float]) -> TrainState:
    """Return the state with these values in row 1 of parameters."""

    def change_leaf(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        if name not in values:
            return x
        numbers = np.array(x)
        numbers[1] = values[name]
        return jax.device_put(numbers, x.sharding)

    params = jax.tree.map_with_path(change_leaf, state.params)
    return dataclasses.replace(state, params=params)


def find(mesh: dict[str, int], values: dict[str, float], num_layers: int = 2, **train) -> str:
    train, model = {"microbatches": 2} | train, {"num_layers": num_layers}
    cfg = change(TINY, mesh={"fsdp": 1, **mesh}, train=train, model=model)
    cfg = cfg.check(mesh_of(cfg).size)
    with jax.set_mesh(mesh_of(cfg)):
        [(_, batch, _)] = [next(make_loader(cfg).device_batches(mesh_of(cfg), 0))]
        state = with_values(some_state(cfg, mesh_of(cfg)), values)
        return find_nonfinite(cfg, state, batch)


@pytest.mark.parametrize("name", PLACES)
def test_the_first_place_is_named(name):
    value, place = PLACES[name]
    assert find({"fsdp": 2, "tp": 2}, {name: value}) == place


def test_a_base_in_fp8_has_no_gradient_to_look_at():
    adapters = {"lora": Lora(rank=2, targets=("v_proj",)), "init_from": "hf:x", "precision": "fp8"}
    place = find({}, {}, num_layers=1, microbatches=1, **adapters)
    assert place == "nowhere when it was computed again"


def test_a_pipeline_counts_its_layers_as_the_model_does():
    value, place = PLACES["stacks.0.mlp.w_down"]
    assert find({"pp": 2}, {"stacks.0.mlp.w_down": value}) == place


def test_a_gradient_whose_norm_overflows_is_named():
    """Tiny values times a huge w_o are moderate; the gradient of w_v is proportional to w_o."""
    place = find({"pp": 2}, {"stacks.0.attn.w_v": 1e-30, "stacks.0.attn.w_o": 1e30})
    assert place == "in the gradients of stacks.0.attn.w_v, layer 1 from 0"
