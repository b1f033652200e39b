"""Checkpoints go into any sharding and back without a change."""

import jax
import numpy as np
import pytest
from safetensors import safe_open

from tests.hf_layout import abstract, assert_same_tensors, load, saved, stored
from tests.paths import HF
from tests.runs import mesh_of
from ultrascale_jax.config import Config, MeshConfig, PipelineConfig, TrainConfig
from ultrascale_jax.huggingface import checkpoint
from ultrascale_jax.huggingface.config import read_config, read_model_type
from ultrascale_jax.train_step.state import abstract_state

FAMILIES = sorted(folder.name for folder in HF.iterdir())
MESHES = {"mixtral": "dp=1", "phi3": "fsdp=8", "qwen2": "fsdp=8"}
MESHES |= dict.fromkeys(("deepseek_v3", "gpt_oss", "qwen3_moe"), "ep=4,fsdp=2")
"""Meshes of the families that are not loaded on `fsdp=2,sp=2,tp=2`; they have every kind of tensor between them."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_of_a_checkpoint_lands_where_it_belongs_and_comes_back(tmp_path, family):
    mesh = MESHES.get(family, "fsdp=2,sp=2,tp=2")
    folder, out = HF / family, tmp_path / "out"
    cfg, model_type = read_config(folder), read_model_type(folder)
    model, shapes = load(folder, mesh), abstract(cfg, mesh)
    jax.tree.map(lambda p, s: np.testing.assert_equal(p.sharding, s.sharding), model, shapes)
    assert_same_tensors(saved(model, out, model_type), stored(folder))
    assert read_config(out) == cfg and read_model_type(out) == model_type
    with safe_open(out / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("family", "axes", "orders"),
    [
        ("qwen2", {"fsdp": 2, "tp": 2}, ((0, 2, 1, None),)),
        ("qwen2", {"pp": 3}, ((0, None, 1, None, 2, None),)),  # pads the vocabulary too
        ("deepseek_v3", {"ep": 2, "tp": 2}, ((0, None), (None, 2, 1, None))),
    ],
)
def test_layers_go_where_a_pipeline_has_them_and_come_back(tmp_path, family, axes, orders):
    folder = HF / family
    cfg = read_config(folder)
    pipeline = Config(
        model=cfg,
        mesh=MeshConfig(**{"pp": 2, "fsdp": 1} | axes),
        pp=PipelineConfig(schedule="interleaved"),
        train=TrainConfig(microbatches=6),
    )
    shapes = abstract_state(pipeline, mesh_of(pipeline)).params
    assert shapes.orders == orders
    model = checkpoint.load(folder, shapes)
    jax.tree.map(lambda p, s: np.testing.assert_equal(p.sharding, s.sharding), model, shapes)
    alone = load(folder)
    for number, order in enumerate(model.orders):
        leaves = (jax.tree.leaves(jax.device_get(one.stacks[number])) for one in (model, alone))
        for leaf, layers in zip(*leaves, strict=True):
            rows = [0 if n is None else layers[alone.orders[number].index(n)] for n in order]
            jax.tree.map(np.testing.assert_array_equal, list(leaf), rows)
    assert_same_tensors(saved(model, tmp_path / "out"), stored(folder))
