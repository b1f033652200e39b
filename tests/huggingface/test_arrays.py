"""Tensors of a Hugging Face folder by their own names, without a model."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from ultrascale_jax.config import UserError
from ultrascale_jax.huggingface.arrays import read_hf
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.huggingface.tensors import copies, hf_names

FOLDER = Path(__file__).parent.parent / "data/hf/llama3"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def test_all_tensors_have_the_values_shapes_and_types_of_the_file():
    expected = load_file(FOLDER / "model.safetensors")
    arrays = read_hf(FOLDER)
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(array, expected[name])


def test_tensors_are_placed_as_one_says_on_a_mesh_of_other_names():
    mesh = jax.make_mesh((2, 4), ("rows", "columns"))
    placed = NamedSharding(mesh, P("rows", "columns"))
    (array,) = read_hf(FOLDER, [QUERY], place=lambda name, shape: placed).values()
    assert array.sharding == placed
    np.testing.assert_array_equal(array, load_file(FOLDER / "model.safetensors")[QUERY])


def test_a_name_that_is_not_there_is_refused():
    with pytest.raises(UserError, match=r"names=\['model.w'\]: no such tensors"):
        read_hf(FOLDER, [QUERY, "model.w"])


def test_a_file_that_is_cut_short_is_refused(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "hf")
    path = tmp_path / "hf/model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="is not a whole safetensors file"):
        read_hf(tmp_path / "hf")


@pytest.mark.parametrize("folder", sorted(FOLDER.parent.iterdir()), ids=lambda folder: folder.name)
def test_the_names_of_a_model_are_those_of_its_folder(folder):
    cfg = read_config(folder)
    names = hf_names(cfg)
    assert {name for each in names.values() for name in each} | copies(cfg).keys() == set(
        read_hf(folder)
    )
    for path, each in names.items():
        layers = len(cfg.stacks[int(path.split(".")[1])]) if path.startswith("stacks.") else 1
        assert len(each) in (layers, layers * (cfg.experts.num if cfg.experts else 1))
