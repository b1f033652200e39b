"""A checkpoint holds the same bits on every mesh and for every pipeline. tests/nightly/checkpoint has more of them."""

import jax

from tests.checkpoints import BASE, NINE, PLAIN, check_journey, on, save
from tests.runs import bits, change, in_folder, mesh_of
from tests.states import random_state
from ultrascale_jax.checkpoint.load_params import load_params
from ultrascale_jax.config import Experts, MeshConfig, PipelineConfig
from ultrascale_jax.sharding.mesh import make_mesh


def test_a_state_returns_bit_for_bit_from_any_mesh_pipeline_memory_and_padding(tmp_path):
    interleaved = PipelineConfig(schedule="interleaved", virtual=2)

    def place(sizes: dict[str, int], offload: str, pp: PipelineConfig = PLAIN, folding=False):
        return lambda cfg: change(
            on(cfg, sizes, pp), optim={"offload": offload}, moe={"folding": folding}
        )

    places = [
        place({"pp": 4, "fsdp": 2}, "second", interleaved),
        place({"ep": 2, "sp": 4}, "none", folding=True),
    ]
    model = {"vocab_size": 257, "experts": Experts(num=8, top_k=2, d_ff=16, bias=True)}
    cfg = change(NINE, model=model, optim={"moment_dtype": "bfloat16"})
    check_journey(cfg, tmp_path, places)


def test_params_load_without_training_on_another_mesh(tmp_path):
    cfg = in_folder(BASE, tmp_path)
    state = random_state(cfg, mesh_of(cfg))
    save(cfg, state, 2)
    mesh = make_mesh(MeshConfig(fsdp=2, tp=2), jax.devices()[:4])
    loaded_cfg, params = load_params(tmp_path, mesh)
    assert bits(params) == bits(state.params)
    assert params.embed[...].sharding.mesh == mesh
    assert loaded_cfg.mesh == MeshConfig(fsdp=2, tp=2) and loaded_cfg.model == BASE.model
