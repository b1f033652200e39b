"""Tensors of a Hugging Face folder by their own names, without a model."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from tests.paths import HF
from ultrascale_jax.config import UserError
from ultrascale_jax.huggingface.arrays import read_hf
from ultrascale_jax.huggingface.config import read_config, read_model_type
from ultrascale_jax.huggingface.tensors import copies, hf_names

FOLDER = HF / "llama3"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def test_tensors_have_the_values_and_types_of_the_file_and_are_placed_as_one_says():
    expected = load_file(FOLDER / "model.safetensors")
    arrays = read_hf(FOLDER)
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(array, expected[name])
    mesh = jax.make_mesh((2, 4), ("rows", "columns"))
    placed = NamedSharding(mesh, P("rows", "columns"))
    (array,) = read_hf(FOLDER, [QUERY], place=lambda name, shape: placed).values()
    assert array.sharding == placed
    np.testing.assert_array_equal(array, expected[QUERY])
    with pytest.raises(UserError, match=r"names=\['model.w'\]: no such tensors"):
        read_hf(FOLDER, [QUERY, "model.w"])
    with pytest.raises(UserError, match=r"^place\('.*', \(64, 64\)\): must be of type Sharding"):
        read_hf(FOLDER, [QUERY], place=lambda name, shape: P("rows"))


@pytest.mark.parametrize("folder", sorted(HF.iterdir()), ids=lambda folder: folder.name)
def test_the_names_of_a_model_are_those_of_its_folder(folder):
    cfg = read_config(folder)
    names = hf_names(cfg, read_model_type(folder))
    assert {name for each in names.values() for name in each} | copies(cfg).keys() == set(
        read_hf(folder)
    )
    for path, each in names.items():
        layers = len(cfg.stacks[int(path.split(".")[1])]) if path.startswith("stacks.") else 1
        assert len(each) in (layers, layers * (cfg.experts.num if cfg.experts else 1))
