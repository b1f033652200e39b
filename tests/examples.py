"""The programs of `examples/` as modules."""

import importlib.util
from types import ModuleType
from typing import Any

import jax
import numpy as np

from tests.paths import ROOT

FOLDER = ROOT / "examples"


def load(name: str) -> ModuleType:
    """Return `examples/NAME.py` as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def same(result: Any, expected: Any) -> None:
    """Compare arrays to 1e-5 of the largest number of each."""
    for one, other in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())
