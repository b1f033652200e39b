"""The device mesh: seven named axes, always all of them, so that there is one code path."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from ultrascale_jax.config import AXES, MeshConfig

EXPLICIT = (AxisType.Explicit,) * len(AXES)


def make_mesh(cfg: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Make a mesh of all `AXES` over `devices` (default: every device of the run), tp neighbours first.

    Raises `ValueError` when the sizes of `cfg` do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = cfg.resolve(len(devices)).sizes
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), AXES, axis_types=EXPLICIT)


def abstract_mesh(cfg: MeshConfig) -> AbstractMesh:
    """Make the same mesh without devices: shapes and shardings type-check on it, nothing runs."""
    return AbstractMesh(tuple(cfg.sizes.values()), AXES, axis_types=EXPLICIT)
