"""Checkpoints of Hugging Face for tests: loaded, saved, their tensors, and a changed copy."""

import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.paths import HF
from ultrascale_jax.config import Config, MeshConfig, ModelConfig
from ultrascale_jax.huggingface import checkpoint
from ultrascale_jax.huggingface.config import read_config
from ultrascale_jax.sharding.mesh import make_mesh
from ultrascale_jax.train_step.state import abstract_state


@functools.cache
def abstract(model: ModelConfig, mesh: str = "dp=1") -> nnx.Module:
    """Return the abstract parameters of `model` on this mesh, which `load` fills on the first devices."""
    sizes = MeshConfig.parse(mesh)
    num_devices = int(np.prod(list(sizes.sizes.values())))
    cfg = Config(model=model, mesh=sizes).check(num_devices)
    return abstract_state(cfg, make_mesh(cfg.mesh, jax.devices()[:num_devices])).params


def load(folder: Path, mesh: str = "dp=1") -> nnx.Module:
    """Return the parameters of a folder on this mesh."""
    return checkpoint.load(folder, abstract(read_config(folder), mesh))


def stored(folder):
    """All tensors of a checkpoint, by name, as float32."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= {name: value.astype(np.float32) for name, value in load_file(path).items()}
    return tensors


def saved(model, folder: Path, model_type: str | None = None) -> dict[str, np.ndarray]:
    """Save parameters in float32 to a new folder; return its tensors."""
    checkpoint.save(model, model.cfg, folder, dtype="float32", model_type=model_type)
    return stored(folder)


def assert_same_tensors(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def changed(family: str, folder: Path, tensors: Mapping[str, Any], **config: Any) -> Path:
    """Copy the checkpoint of a family to a new folder with these tensors; return the path.

    A tensor is an array, a shape of ones, or None to leave it out. `config` are keys of its config.json.
    """
    shutil.copytree(HF / family, folder)
    made = {**load_file(folder / "model.safetensors"), **tensors}
    arrays = {n: np.ones(v, np.float32) if isinstance(v, tuple) else v for n, v in made.items()}
    kept = {name: array for name, array in arrays.items() if array is not None}
    save_file(kept, folder / "model.safetensors")
    if config:
        keys = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(keys | config))
    return folder
