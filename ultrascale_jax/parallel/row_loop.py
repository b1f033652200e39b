"""Loops over the rows of stacks, one row a layer, and how XLA moves those rows.

A GPU's copy engine moves a row only where its place is linear in the counter of the compiled loop; otherwise a kernel
does, and waits for it. `Lowering` says where copy engines help.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config.lowering import Lowering
from ultrascale_jax.kernels.xla import uninitialised
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.rules import mesh_size, vary, varying


class RowLoop:
    """Loops over `num` rows."""

    def __init__(self, num: int, lowering: Lowering):
        self.num, self.lowering = num, lowering

    def each(self, body: Callable, carry: Any) -> Any:
        """Run `carry = body(i, carry)` for each row i: a scan that writes into stacks nobody has set to zero.

        With copy engines the counter is from 1, the next row's place: from 0 XLA would compute that place in an
        operation of its own.
        """
        first = int(self.lowering.copies_rows)

        def step(state):
            i, carry = state
            return i + 1, body(i - first, carry)

        with self._unrolled():
            end = self.num + first
            return jax.lax.while_loop(lambda state: state[0] < end, step, (first, carry))[1]

    def each_from_last(self, body: Callable, rows: Any, carry: Any) -> Any:
        """Run `carry = body(i, row i of rows, carry)` for each row i, the last one first."""
        if not self.lowering.copies_rows:

            def scanned(carry, numbered_row):
                return body(*numbered_row, carry), None

            numbered = jnp.arange(self.num), rows
            with self._unrolled():
                return jax.lax.scan(scanned, carry, numbered, reverse=True)[0]

        def step(done, carry):
            i = self.num - 1 - done
            return body(i, read_row(rows, i), carry)

        return self.each(step, carry)

    def neighbour(self, i: jax.Array) -> jax.Array:
        """Return the place of a neighbour's row, i + 1 or i - 1, bounded where no copy engine should move it."""
        return i if self.lowering.copies_rows else jnp.clip(i, 0, self.num - 1)

    def written(self, i: jax.Array) -> jax.Array:
        """Return the place of a row to write, bounded so that no copy engine moves it where `Lowering` says so."""
        return jnp.minimum(i, self.num - 1 if self.lowering.bounds_written_rows else self.num + 1)

    def _unrolled(self) -> contextlib.AbstractContextManager:
        """Mark the loops inside; XLA unrolls them where `xla_gpu_enable_while_loop_unrolling` is manual."""
        if not self.lowering.unrolls:
            return contextlib.nullcontext()
        return set_xla_metadata(_xla_loop_unroll_strategy="double-buffer")


def read_row(stacks: Any, i: jax.Array | int) -> Any:
    """Return row `i`, bounded to the rows that there are."""

    def read(stack):
        return jax.lax.dynamic_index_in_dim(
            stack, i, 0, keepdims=False, allow_negative_indices=False
        )

    return jax.tree.map(read, stacks)


def write_row(stacks: Any, row: Any, i: jax.Array | int) -> Any:
    """Write row `i`, bounded to the rows that there are."""

    def write(stack, value):
        return jax.lax.dynamic_update_index_in_dim(stack, value, i, 0, allow_negative_indices=False)

    return jax.tree.map(write, stacks, row)


def zeros(like: Any, num: int | None = None) -> jax.Array:
    """Return zeros of a type, or a stack of `num` such."""
    rows = () if num is None else (num,)
    # On Auto axes XLA chooses the sharding.
    typed = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    sharding = _stacked(like, len(rows)) if typed else None
    return vary(jnp.zeros((*rows, *like.shape), like.dtype, out_sharding=sharding), varying(like))


def empty_stack(like: Any, num: int) -> jax.Array:
    """Return a stack of `num` arrays of a type, to be written before it is read.

    `jnp.zeros` would be written, and copied for each further stack of that type: 2% of the time of Llama 3 8B. Stacks
    are zeros where no type says how each device holds them: on Auto axes, or in a region that is manual over some.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = set(mesh.axis_types)
    if kinds == {AxisType.Manual}:
        return vary(uninitialised((num, *like.shape), like.dtype), varying(like))
    spec = _stacked(like, 1)
    if spec.reduced or kinds != {AxisType.Explicit}:
        return zeros(like, num)
    # Each device's partial sums are first a row of their own.
    axes = tuple(sorted(spec.unreduced))
    rows = P(axes, *spec.partitions) if axes else spec
    shape = (mesh_size(*axes),) * bool(axes) + (num, *like.shape)
    shard = jax.sharding.NamedSharding(mesh, rows).shard_shape(shape)
    # Outside of a region XLA would allocate the global stack on each device.
    array = smap(lambda: uninitialised(shard, like.dtype), in_specs=(), out_specs=rows)()
    return jax.lax.reduce_sum(array, (0,), out_sharding=spec) if axes else array


def host_stacks(rows: list, num: int) -> list:
    """Return a stack of `num` rows of each type in the host's memory; XLA does not fill it.

    The values differ, because XLA would take equal ones for one stack and copy it.
    """
    stacks = [
        jnp.full((num, *row.shape), value, row.dtype, out_sharding=_stacked(row, 1))
        for value, row in enumerate(rows)
    ]
    return move(jax.memory.Space.Host, stacks)


def move(space: jax.memory.Space, arrays: list) -> list:
    """Move arrays to the memory of the device, or of the host."""
    return [jax.device_put(array, space) for array in arrays]


def _stacked(like: Any, dims: int) -> P:
    """Return the sharding of a type with `dims` more leading dims, which no axis shards."""
    spec = P() if like.sharding is None else like.sharding.spec
    return P(*(None,) * dims, *spec.partitions, reduced=spec.reduced, unreduced=spec.unreduced)
