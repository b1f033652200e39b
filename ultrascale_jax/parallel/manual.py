"""The one door to `jax.shard_map`: a region in which each device sees its own piece."""

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import AXES


def smap(fn: Callable, *, in_specs: Any, out_specs: Any, axes: Collection[str] = AXES) -> Callable:
    """`fn` on this device's pieces, manual over `axes` of the current mesh.

    Axes that are manual already, because the call stands inside another region, are left as they are; when all are,
    `fn` is returned unchanged. Varying-axes checks are always on: without them a differentiated `psum` gives wrong
    gradients in silence.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = set(axes) & set(mesh.axis_names) - set(mesh.manual_axes)
    if not axes:
        return fn

    def keep(spec: P) -> P:
        parts = (
            part if isinstance(part, tuple) or part is None else (part,) for part in spec.partitions
        )
        return P(
            *(part and (tuple(axis for axis in part if axis in axes) or None) for part in parts)
        )

    in_specs, out_specs = jax.tree.map(
        keep, (in_specs, out_specs), is_leaf=lambda x: isinstance(x, P)
    )
    return jax.shard_map(
        fn, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=True
    )
