"""The programs of `examples/` as modules, and the examples of pages."""

import importlib.util
import re
import textwrap
from pathlib import Path
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


def on_page(page: str) -> list[str]:
    """Return the Python examples of a page, as `docs/library.md`."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(source: str, out: Path | None = None) -> dict[str, Any]:
    """Run an example of a page and return its names; it writes to `out` where it says `out/`."""
    names: dict[str, Any] = {}
    source = (
        textwrap.dedent(source).replace('"tests/', f'"{ROOT}/tests/').replace("out/", f"{out}/")
    )
    exec(compile(source, "example", "exec"), names)
    return names
