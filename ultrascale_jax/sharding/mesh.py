"""The device mesh: seven named axes, always all of them, so that there is one code path."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from ultrascale_jax.config import AXES, MeshConfig, require, require_type

EXPLICIT = (AxisType.Explicit,) * len(AXES)


def make_mesh(cfg: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Make a mesh of all `AXES` over `devices` (default: every device of the run), tp neighbours first.

    Raises `ValueError` when the sizes of `cfg` do not multiply to the number of devices.
    """
    require_type("cfg", cfg, MeshConfig, "of a Config give cfg.mesh")
    devices = jax.devices() if devices is None else devices
    sizes = cfg.resolve(len(devices)).sizes
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), AXES, axis_types=EXPLICIT)


def check_mesh(cfg: MeshConfig, mesh: Mesh | AbstractMesh) -> None:
    """Refuse a `mesh` that is not that of `cfg`, of which one axis may still be open."""
    is_mesh, fix = isinstance(mesh, (Mesh, AbstractMesh)), "must be a mesh: make_mesh(cfg.mesh)"
    require(is_mesh, "mesh", mesh, fix)
    has, expected = dict(mesh.shape), {axis: size for axis, size in cfg.sizes.items() if size != -1}
    fix = f"cfg.mesh is {cfg.text}; make the mesh of it, make_mesh(cfg.mesh), or change cfg.mesh"
    same = tuple(has) == AXES and expected.items() <= has.items()
    text = ",".join(f"{axis}={size}" for axis, size in has.items() if size != 1)
    require(same, "mesh", text or "one device", fix)


def check_mesh_is_set(caller: str) -> None:
    """Refuse a call outside a mesh of `AXES`."""
    names = jax.sharding.get_abstract_mesh().axis_names
    fix = f"call {caller} inside `with jax.set_mesh(make_mesh(cfg.mesh))`"
    require(names == AXES, "mesh", names, fix)


def abstract_mesh(cfg: MeshConfig) -> AbstractMesh:
    """Make the same mesh without devices: shapes and shardings type-check on it, nothing runs."""
    require_type("cfg", cfg, MeshConfig, "of a Config give cfg.mesh")
    fix = "is open; give its size, or cfg.check(num_devices).mesh"
    require(-1 not in cfg.sizes.values(), "mesh", cfg.text, fix)
    return AbstractMesh(tuple(cfg.sizes.values()), AXES, axis_types=EXPLICIT)
