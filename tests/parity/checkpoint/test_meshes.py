"""A checkpoint holds the same bits on every mesh and for every pipeline. tests/nightly/checkpoint has more of them."""

import jax
import pytest

from tests.checkpoints import BASE, NINE, check_journey, on, save
from tests.runs import bits, in_folder, mesh_of
from tests.states import random_state
from ultrascale_jax.checkpoint.load_params import load_params
from ultrascale_jax.config import MeshConfig, PipelineConfig
from ultrascale_jax.sharding.mesh import make_mesh


@pytest.mark.parametrize("sizes", [{"dp": 2, "fsdp": 2, "sp": 2}, {"fsdp": 2, "tp": 4}], ids=str)
def test_a_state_returns_bit_for_bit_on_any_mesh(tmp_path, sizes):
    check_journey(BASE, tmp_path, [lambda cfg: on(cfg, sizes)])


def test_a_checkpoint_depends_on_neither_pipeline_nor_schedule(tmp_path):
    interleaved = PipelineConfig(schedule="interleaved", virtual=2)
    check_journey(NINE, tmp_path, [lambda cfg: on(cfg, {"pp": 4, "fsdp": 2}, interleaved)])


def test_params_load_without_training_on_another_mesh(tmp_path):
    cfg = in_folder(BASE, tmp_path)
    state = random_state(cfg, mesh_of(cfg))
    save(cfg, state, 2)
    mesh = make_mesh(MeshConfig(fsdp=2, tp=2), jax.devices()[:4])
    loaded_cfg, params = load_params(tmp_path, mesh)
    assert bits(params) == bits(state.params)
    assert params.embed[...].sharding.mesh == mesh
    assert loaded_cfg.mesh == MeshConfig(fsdp=2, tp=2) and loaded_cfg.model == BASE.model
