"""Keep moments of the layers' matrices in the host's memory, and update them layer by layer.

The device then holds one row of these moments, on each rank of a pipeline one. The type of an array says in which
memory it is, so the update reads no option.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ultrascale_jax.models.layers import each_param
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.memories import is_on_host, on_device, on_host
from ultrascale_jax.sharding.rules import is_matrix, mesh_size

Advance = Callable[..., tuple[Transformer, Any]]
"""`advance(params, opt_state, grads, row)` returns parameters and optimizer state after an update, array by array."""


def to_host(opt_state: Any, params: Transformer, which: str) -> Any:
    """Return a fresh optimizer state, all zeros, with the moments in the host's memory that `optim.offload` names.

    They are written there row by row: the device holds none of them.
    """

    def leaf(x: jax.Array) -> jax.Array:
        rows = _by_row(on_host(_zeros(x)))
        row = _zeros(x, rows=mesh_size("pp"))
        written = jax.lax.fori_loop(0, _num_rows(x), lambda i, rows: _write(rows, row, i), rows)
        return jax.lax.reshape(written, x.shape, out_sharding=_spec(x))

    return map_named(leaf, opt_state, params, which)


def map_named(fn: Callable, opt_state: Any, params: Transformer, which: str) -> Any:
    """Replace each array of an optimizer's state that `optim.offload` names by `fn` of it."""
    dims, owners = _dims(params), iter(_owners(opt_state))

    def leaf(path: tuple, x: Any) -> Any:
        owner = next(owners)
        if which == "none" or owner is None:
            return x
        is_named = which == "both" or any(getattr(key, "name", "") == "nu" for key in path)
        return fn(x) if is_named and _is_stacked(dims[owner]) and is_matrix(dims[owner]) else x

    return jax.tree.map_with_path(leaf, opt_state)


def update(
    advance: Advance, params: Transformer, opt_state: Any, grads: Transformer
) -> tuple[Transformer, Any]:
    """Return the results of `advance`, which is called for each row of the stacks with moments on the host.

    There every stack has that row alone, whose number is the argument `row`; results for the other stacks
    are not used. Before that the arrays on the device are updated, as a whole and without a row.
    """
    if not any(map(is_on_host, jax.tree.leaves((params, opt_state)))):
        return advance(params, opt_state, grads)
    arrays, form = jax.tree.flatten((params, opt_state, grads))
    every, owners = range(len(jax.tree.leaves(params))), _owners(opt_state)
    owners = [*every, *owners, *every]
    stacked = [_is_stacked(dims) for dims in _dims(params)]
    moved = {n for n, x in zip(owners, arrays, strict=True) if n is not None and is_on_host(x)}

    def run(arrays: list, row: jax.Array | None) -> tuple[Transformer, Any]:
        return advance(*jax.tree.unflatten(form, arrays), row)

    on_device_alone = [_zeros(x) if is_on_host(x) else x for x in arrays]
    results, result_form = jax.tree.flatten(run(on_device_alone, None))
    for length in {_num_rows(arrays[n]) for n in moved}:
        chosen = {n for n in moved if _num_rows(arrays[n]) == length}
        written = [n for n in range(len(results)) if owners[n] in chosen]

        def body(i: jax.Array, stacks: list, chosen=chosen, written=written) -> list:
            current = dict(zip(written, stacks, strict=True))
            rows = list(arrays)
            for n, (owner, x) in enumerate(zip(owners, arrays, strict=True)):
                if owner in chosen:
                    rows[n] = _read(current.get(n, _by_row(x)), i, x)
                elif owner is not None and stacked[owner]:
                    rows[n] = _zeros(x, rows=mesh_size("pp"))
            new = jax.tree.leaves(run(rows, i))
            return [_write(current[n], new[n], i) for n in written]

        stacks = jax.lax.fori_loop(0, length, body, [_by_row(arrays[n]) for n in written])
        for n, stack in zip(written, stacks, strict=True):
            results[n] = jax.lax.reshape(stack, arrays[n].shape, out_sharding=_spec(arrays[n]))
    return jax.tree.unflatten(result_form, results)


def _dims(params: Transformer) -> list[str]:
    return each_param(lambda value, dims, act_dims: dims, params)


def _is_stacked(dims: str) -> bool:
    return dims.startswith("L")


def _owners(opt_state: Any) -> list[int | None]:
    """Return the number of the trained parameter that each array of an optimizer's state belongs to.

    Moments are models, or a list in the order of the parameters (Muon's).
    """

    def is_model(x: object) -> bool:
        return isinstance(x, Transformer)

    owners: list[int | None] = []
    for path, node in jax.tree.leaves_with_path(opt_state, is_leaf=is_model):
        if is_model(node):
            owners += range(len(jax.tree.leaves(node)))
        else:
            in_list = isinstance(path[-1], jax.tree_util.SequenceKey)
            owners.append(path[-1].idx if in_list else None)
    return owners


def _spec(x: Any) -> P:
    return jax.typeof(x).sharding.spec


def _num_rows(x: jax.Array) -> int:
    """Return the rows of a stack that one rank of the pipeline has."""
    return x.shape[0] // mesh_size("pp")


def _zeros(x: jax.Array, rows: int | None = None) -> jax.Array:
    """Return zeros on the device in the type of `x`, or of so many of its rows."""
    shape = x.shape if rows is None else (rows, *x.shape[1:])
    return jnp.zeros(shape, x.dtype, out_sharding=_spec(x))


def _by_row(x: jax.Array) -> jax.Array:
    """View a stack `[L, ...]` as `[ranks, rows of one, ...]`."""
    first, *inner = (*_spec(x).partitions, *(None,) * (x.ndim - len(_spec(x).partitions)))
    shape = mesh_size("pp"), _num_rows(x), *x.shape[1:]
    return jax.lax.reshape(x, shape, out_sharding=P(first, None, *inner))


def _read(stack: jax.Array, i: jax.Array, like: jax.Array) -> jax.Array:
    """Return row `i` of each rank on the device, sharded as `like`, the stack."""
    row = jax.lax.dynamic_slice_in_dim(stack, i, 1, 1, allow_negative_indices=False)
    row = jax.lax.reshape(row, (row.shape[0], *like.shape[1:]), out_sharding=_spec(like))
    return on_device(row)


def _write(stack: jax.Array, row: jax.Array, i: jax.Array) -> jax.Array:
    """Write row `i` of each rank, in the memory of the stack."""
    spec = _spec(stack)
    row = jax.lax.reshape(row, (row.shape[0], 1, *row.shape[1:]), out_sharding=spec)
    row = on_host(row) if is_on_host(stack) else row
    return jax.lax.dynamic_update_slice_in_dim(stack, row, i, 1, allow_negative_indices=False)
