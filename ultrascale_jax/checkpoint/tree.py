"""Save any pytree of arrays with a fingerprint of each, and load it on any mesh."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from ultrascale_jax import quiet_imports
from ultrascale_jax.checkpoint import restoring
from ultrascale_jax.checkpoint.fingerprint import is_supported
from ultrascale_jax.checkpoint.run_metadata import versions
from ultrascale_jax.checkpoint.step_dirs import (
    check_path,
    steps,
    with_digest,
)
from ultrascale_jax.config import UserError, require, whole
from ultrascale_jax.launch.multihost import on_process0

GROUP = "tree"
"""Name of the group of arrays; they are numbered, and the metadata lists their paths."""


def save_tree(
    folder: str | Path, tree: Any, *, step: int, meta: Mapping[str, Any] | None = None
) -> Path:
    """Write the arrays of a pytree as `folder/step`, and return that path once it is complete.

    Every process of a job calls it. A save that is interrupted leaves nothing that `load_tree` takes for a tree.

    Args:
      folder: a folder on a disk that all processes share.
      tree: any pytree whose leaves are arrays of numbers or booleans, sharded in any way.
      step: number of this tree, at least 0.
      meta: JSON values that `tree_meta` returns.

    Raises:
      UserError: `folder` already has this step, a leaf is no array of a supported type, or `meta` is not JSON.
      OSError: the disk is full or cannot be written.
    """
    folder, step = Path(folder).absolute(), whole("step", step)
    check_path("folder", folder)
    written = on_process0(lambda: steps(folder))
    require(step not in written, "step", step, f"{folder} has it; remove it, or choose another")
    try:
        user_meta = json.loads(json.dumps(dict(meta or {})))
    except (TypeError, ValueError) as error:
        raise UserError(f"meta={meta!r}: must be values of JSON ({error})") from None
    arrays = {path: _array(path, leaf) for path, leaf in _leaves(tree).items()}
    groups: dict[str, dict] = {GROUP: {str(i): x for i, x in enumerate(arrays.values())}}
    saved = {
        "data": {"step": step},
        "versions": versions(),
        "arrays": restoring.record(groups),
        "paths": list(arrays),
        "meta": user_meta,
    }
    place = folder / str(step)
    quiet_imports.ocp.save_checkpointables(str(place), groups, custom_metadata=with_digest(saved))
    return place


def load_tree[Tree](folder: str | Path, like: Tree, *, step: int | None = None) -> Tree:
    """Load a pytree that `save_tree` wrote, in the structure, shapes, types and shardings of `like`.

    Every process of a job calls it. Without `step` it loads the newest one that restores as it was saved, and names
    the newer ones; nothing is renamed or removed.

    Args:
      folder: the folder given to `save_tree`.
      like: a pytree of arrays, or of `jax.ShapeDtypeStruct` leaves; one without a sharding is placed on the first
        device. Floats are rounded to another type of floats; any other type must hold every value of the saved one.
      step: the tree to load; None is the newest.

    Raises:
      UserError: there is no such step, or it holds other paths, shapes or types than `like`.
      Damaged: an array is not the one that was saved, in this step or without `step` in all.
    """
    folder = Path(folder).absolute()
    shapes = {path: _shape(path, leaf) for path, leaf in _leaves(like).items()}

    def restore(step: int) -> Tree:
        place = folder / str(step)
        saved = _metadata(place)
        number = {path: str(i) for i, path in enumerate(saved["paths"])}
        _check_paths(place, number.keys(), shapes.keys())
        entries = restoring.entries(saved)
        for path, shape in shapes.items():
            _check_form(place, path, entries[f"{GROUP}/{number[path]}"], shape)
        shapes_by_number = {number[path]: shape for path, shape in shapes.items()}
        titles = {f"{GROUP}/{i}": f"tree{path}" for path, i in number.items()}
        arrays = restoring.load(place, saved, {GROUP: shapes_by_number}, titles)[GROUP]
        leaves = [arrays[number[path]] for path in shapes]
        return restoring.cast(jax.tree.unflatten(jax.tree.structure(like), leaves), like)

    return restoring.chosen_or_newest(folder, step, restore)


def tree_meta(folder: str | Path, *, step: int | None = None) -> dict[str, Any]:
    """Return the `meta` of a tree that `save_tree` wrote, by default of the newest whose metadata is as it was saved.

    Raises `UserError` where there is no such step, and `Damaged`.
    """
    folder = Path(folder).absolute()
    return restoring.chosen_or_newest(
        folder, step, lambda step: _metadata(folder / str(step))["meta"]
    )


def _metadata(place: Path) -> dict:
    return restoring.read_metadata(place, (GROUP,), ("data", "versions", "arrays", "meta"))


def _leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by path."""
    leaves = {jax.tree_util.keystr(keys): leaf for keys, leaf in jax.tree.leaves_with_path(tree)}
    require(len(leaves) > 0, "tree", tree, "has no leaves; give a pytree of arrays")
    return leaves


def _array(path: str, leaf: Any) -> jax.Array:
    """Return a leaf as a JAX array; refuse one that cannot be saved with a fingerprint."""
    fix = "is no array; save arrays, and other values as meta"
    require(_has_type(leaf), f"tree{path}", leaf, fix)
    fix = "has no fingerprint; save jax.random.key_data of keys, and other types by their bits"
    require(is_supported(leaf.dtype), f"tree{path}.dtype", str(leaf.dtype), fix)
    saved = jax.dtypes.canonicalize_dtype(leaf.dtype)
    fix = f"would be saved as {saved}; cast it, or set jax_enable_x64"
    require(saved == leaf.dtype, f"tree{path}.dtype", str(leaf.dtype), fix)
    return jnp.asarray(leaf)


def _shape(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape, type and sharding in which to load a leaf."""
    fix = "is neither an array nor a jax.ShapeDtypeStruct"
    require(_has_type(leaf), f"like{path}", leaf, fix)
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _has_type(leaf: Any) -> bool:
    """Return whether a leaf has the shape and type of an array."""
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def _check_paths(place: Path, saved: Any, expected: Any) -> None:
    """Raise unless the tree has the paths of `like`."""
    for paths, fault in (
        (expected - saved, "lacks"),
        (saved - expected, "has, and `like` has not,"),
    ):
        shown = sorted(paths)[:5]
        require(not paths, "like", shown, f"{place} {fault} {len(paths)} such arrays")


def _check_form(
    place: Path, path: str, saved: tuple[Any, tuple[int, ...], str], expected: jax.ShapeDtypeStruct
) -> None:
    """Raise unless a saved array has the shape of the leaf at `path` of `like`, and a type that may be cast to its."""
    dtype, shape, _ = saved
    fix = f"{place} holds {shape} there; give `like` that shape, or load another step"
    require(expected.shape == shape, f"like{path}.shape", expected.shape, fix)
    fix = f"cannot hold the values of {dtype}, which {place} has there; give `like` {dtype}, and cast what is loaded"
    require(_may_cast(dtype, expected.dtype), f"like{path}.dtype", str(expected.dtype), fix)


def _may_cast(saved: Any, target: Any) -> bool:
    """Return whether floats become floats, or each value of the type `saved` is one of the type `target`."""
    if not jnp.issubdtype(target, jnp.floating) or saved == jnp.bool_:
        return np.can_cast(saved, target, "safe")
    if jnp.issubdtype(saved, jnp.floating):
        return True
    # The sign of an integer is a bit of its own, and the first bit of a mantissa is not stored.
    bits = jnp.iinfo(saved).bits - jnp.issubdtype(saved, jnp.signedinteger)
    return jnp.finfo(target).nmant + 1 >= bits
