"""Checkpoints through many pipelines and meshes."""

import functools

import jax
import numpy as np
import pytest

from tests.checkpoints import MIXED, NINE, PLAIN, check_journey, on, save
from tests.runs import bits, change, in_folder, mesh_of
from ultrascale_jax.checkpoint.load_params import load_params
from ultrascale_jax.config import MeshConfig, PipelineConfig
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.state import init_state

INTERLEAVED = {"pp": 4, "fsdp": 2}, PipelineConfig(schedule="interleaved", virtual=2)
EXPERTS = [({"ep": 4}, PLAIN), ({"ep": 2, "fsdp": 2}, PLAIN), ({"pp": 2, "ep": 2}, PLAIN)]
ON_TWO = {"pp": 2, "fsdp": 2, "sp": 2}, PLAIN
ZB_V = {"pp": 2, "dp": 2}, PipelineConfig(schedule="zb_v")
# Layers as on one device; and ranks that divide no dim of any parameter.
ON_THREE = [({"pp": 3, "tp": 2}, PLAIN), ({"pp": 3}, PipelineConfig(schedule="interleaved"))]


@pytest.mark.parametrize(
    ("cfg", "optim", "places"),
    [
        (NINE, "adamw", [ZB_V, INTERLEAVED, ON_TWO]),
        (NINE, "muon", [ON_TWO, ({"pp": 4, "fsdp": 2}, PLAIN)]),
        (NINE, "adamw", ON_THREE),
        (MIXED, "adamw", EXPERTS),
        (MIXED, "muon", EXPERTS),
    ],
)
def test_a_state_returns_bit_for_bit_from_pipelines_and_experts(tmp_path, cfg, optim, places):
    calls = [functools.partial(on, sizes=sizes, pp=pp) for sizes, pp in places]
    check_journey(change(cfg, optim={"name": optim}), tmp_path, calls)


def test_params_of_a_pipeline_load_on_another_with_consecutive_layers(tmp_path):
    cfg = in_folder(on(NINE, *INTERLEAVED), tmp_path)
    save(cfg, init_state(cfg, mesh_of(cfg)), 1)
    params = init_state(NINE, mesh_of(NINE)).params
    _, alone = load_params(tmp_path, mesh_of(NINE))
    assert bits(alone) == bits(params)
    on_two, halves = load_params(tmp_path, make_mesh(MeshConfig(pp=2, fsdp=1), jax.devices()[:2]))
    assert on_two.pp == PipelineConfig() and on_two.mesh.pp == 2
    assert halves.orders == ((*range(9), None),)
    for leaf, expected in zip(
        jax.tree.leaves(halves.stacks), jax.tree.leaves(params.stacks), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(leaf)[:9], expected)
