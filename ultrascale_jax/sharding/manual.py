"""The one door to `jax.shard_map`: a region in which each device sees its own shard."""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import require
from ultrascale_jax.sharding.rules import check_axes


def manual_axis_size(axis: str, splits: str) -> int:
    """Return the size of an axis that is manual here, and refuse another; `splits` says what it splits."""
    is_manual = axis in jax.sharding.get_abstract_mesh().manual_axes
    fix = f"is not manual here; call this inside jax.shard_map over the axis that splits {splits}"
    require(is_manual, "axis", axis, fix)
    return jax.lax.axis_size(axis)


def smap(
    fn: Callable,
    *,
    in_specs: Any,
    out_specs: Any,
    axes: Collection[str] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> Callable:
    """Run `fn` on this device's shards, manual over `axes` (default: all) of `mesh` (default: the current one).

    Axes that are manual already, because the call stands inside another region, are left as they are; when all are,
    `fn` is returned unchanged. Varying-axes checks are always on: without them a differentiated `psum` gives wrong
    gradients in silence. An input that is `reduced` over an axis has to be made varying over it inside (`vary`): its
    cotangent leaves the region as a partial sum.
    """
    check_axes(axes)
    current = jax.sharding.get_abstract_mesh()
    on = current if mesh is None else mesh
    fix = f"must be axes of the mesh: {', '.join(map(str, on.axis_names))}"
    require(on.empty or set(axes or ()) <= set(on.axis_names), "axes", axes, fix)
    axes = set(on.axis_names if axes is None else axes) & set(on.axis_names) - set(
        current.manual_axes
    )
    if not axes:
        return fn
    alone = _is_one_device(on, axes)
    kept_in, kept_out = jax.tree.map(
        lambda spec: _only(spec, axes, sums=not alone), (in_specs, out_specs), is_leaf=_is_spec
    )
    region = jax.shard_map(
        fn, mesh=mesh, in_specs=kept_in, out_specs=kept_out, axis_names=axes, check_vma=True
    )
    return _typed_outside(region, out_specs, axes) if alone else region


def _typed_outside(region: Callable, out_specs: Any, axes: set[str]) -> Callable:
    """Return a region over one device that takes reduced arguments and gives partial sums over `axes`.

    JAX 0.12.0 lowers no region there, and fails where a result or a cotangent is a partial sum ("Expected last op to be
    sdy.sharding_constraint").
    """

    def run(*args):
        results = region(*jax.tree.map(_plain, args))

        def leave(spec: P, part: Any) -> Any:
            return jax.tree.map(lambda x: _partial(x, spec.unreduced & axes), part)

        return jax.tree.map(leave, out_specs, results, is_leaf=_is_spec)

    return run


def _is_spec(x: object) -> bool:
    return isinstance(x, P)


def _only(spec: P, axes: set[str], *, sums: bool) -> P:
    """Return a spec with these of its axes alone; without `sums` no dim is reduced or unreduced."""
    parts = (
        part if isinstance(part, tuple) or part is None else (part,) for part in spec.partitions
    )
    return P(
        *(part and (tuple(axis for axis in part if axis in axes) or None) for part in parts),
        reduced=spec.reduced & axes if sums else frozenset(),
        unreduced=spec.unreduced & axes if sums else frozenset(),
    )


def _is_one_device(mesh: Mesh | AbstractMesh, axes: Collection[str]) -> bool:
    return math.prod(mesh.shape[axis] for axis in axes) == 1


def leave_partial(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Leave partial sums over `axes` as the result of a region over all axes, whose out_spec is `unreduced` there."""
    names = tuple(sorted(axes))
    if not names:
        return x
    mesh = jax.sharding.get_abstract_mesh()
    return (
        jax.lax.psum(x, names)
        if _is_one_device(mesh, mesh.axis_names)
        else jax.lax.pcast(x, names, to="unreduced")
    )


def _plain(x: jax.Array) -> jax.Array:
    reduced = jax.typeof(x).sharding.spec.reduced
    return _forget(reduced, x) if reduced else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forget(reduced: frozenset[str], x: jax.Array) -> jax.Array:
    """Return x as if it were not `reduced`; its cotangent is one that is unreduced."""
    return jax.reshard(x, P(*jax.typeof(x).sharding.spec.partitions))


def _partial(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Type x as a partial sum over axes of one device."""
    if not axes:
        return x
    parts, dims = jax.typeof(x).sharding.spec.partitions, range(1, x.ndim + 1)
    spread = P(tuple(sorted(axes)), *parts)
    x = jax.lax.broadcast_in_dim(x, (1, *x.shape), dims, out_sharding=spread)
    return jax.lax.reduce_sum(x, (0,), out_sharding=P(*parts, unreduced=axes))


_forget.defvjp(
    lambda reduced, x: (_forget(reduced, x), None), lambda reduced, _, g: (_partial(g, reduced),)
)
