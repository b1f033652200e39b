"""A scan over layers that gathers the next layer's parameters ahead and scatters a layer's gradients late (ZeRO-3).

While layer i computes, the parameters of the layer that comes next travel: those of i + 1 in the forward pass, of i - 1
in the backward pass, where beside them the gradients of layer i + 1 are reduce-scattered, and the shards of layer i + 2
are summed over replicas if each layer does that. A plain scan gathers what the same iteration needs, and XLA's
scheduler can hide it only behind the rest of that iteration. The price is memory: one more layer of gathered
parameters, one layer of gradients that wait, and one of shards.
"""

import contextlib
import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config.lowering import Lowering
from ultrascale_jax.parallel.pipeline.split_backward import LayerVJP
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.rules import mesh_size

AHEAD = Lowering(gathers_ahead=True)
"""Gathering ahead, and nothing else."""


class Layer(NamedTuple):
    """One layer, as a function of parameters that are gathered before it runs."""

    gather: Callable[[Any, Any], Any]
    """`(params, constants) -> gathered`: the all-gathers of one layer; its transpose is the reduce-scatters."""
    run: Callable[[Any, jax.Array, Any, Any], tuple]
    """`(gathered, x, context, constants) -> (y, aux[, statistics])`: y and x alike, aux a float array."""
    leave_sums: Callable[[Any], Any] | None = None
    """`params -> params`, typed so that the transpose of `gather` leaves sums over replicas to the transpose of this.
    Without it `gather` makes such sums itself, if there are any."""


def prefetch_scan(
    layer: Layer,
    params: Any,
    constants: Any,
    x: jax.Array,
    context: Any,
    *,
    lowering: Lowering = AHEAD,
    offload: Collection[str] = (),
) -> tuple[jax.Array, tuple]:
    """Run `layer` for each row of `params` and `constants`, in order.

    Args:
      layer: what each row does.
      params: a tree of float arrays with a leading dim of layers.
      constants: another, of any type, which is not differentiated.
      x: what the first layer gets.
      context: a tree of arrays that every layer gets; it is not differentiated.
      lowering: how XLA runs the scan: its `delay`, `unrolls`, `copies_rows` and `bounds_written_rows`.
      offload: names of what `layer.run` keeps (`checkpoint_name`) that wait for the backward pass in the host's memory.
        They go there while the next layer computes, and return one layer ahead; the last layer's stay.

    Returns:
      The last layer's y, and `(aux[, statistics])` of every layer, stacked; statistics are not differentiated.
    """
    loop = _Loop(layer, len(jax.tree.leaves(params)[0]), lowering, offload)

    @jax.custom_vjp
    def scanned(params, constants, x, context):
        return loop.forward(params, constants, x, context, keep=False)[0]

    def forward(params, constants, x, context):
        return loop.forward(params, constants, x, context, keep=True)

    scanned.defvjp(forward, loop.backward)
    return scanned(params, constants, x, context)


class _Loop:
    """Forward and backward pass of `num` layers."""

    def __init__(self, layer: Layer, num: int, lowering: Lowering, offload: Collection[str]):
        self.layer, self.num, self.lowering, self.offload = layer, num, lowering, offload

    def forward(self, params, constants, x, context, *, keep: bool):
        """Return what `prefetch_scan` does, and what the backward pass needs: of each layer what `LayerVJP` keeps."""
        stacks = params, constants
        first = self.gathered(stacks, 0)
        vjp = self.vjp(first, x, (context, _row(constants, 0))) if keep else None

        def run(x, now, around):
            if vjp is None:
                y, *out = self.layer.run(now, x, *around)
                return y, (tuple(out), None), []
            floats, others = _split(now)
            y, aux, statistics, kept = vjp.forward(floats, x, (others, around))
            here, away = self.parted(vjp, kept)
            return y, ((aux, *statistics), here), away

        def body(i, carry):
            x, now, rows, before, host = carry
            following = self.gathered(stacks, self.bounded(i + 1))
            # Row i is that of layer i - 1: only where a row's place is linear in the loop's counter, here and in the
            # backward pass, does a copy engine of the GPU move it, and not a kernel that waits for PCIe.
            host = _put(host, _to(jax.memory.Space.Host, before), i)
            y, row, away = run(x, now, (context, _row(constants, i)))
            return y, following, _put(rows, row, i), away, host

        _, row, away = jax.eval_shape(run, x, first, (context, _row(constants, 0)))
        rows = jax.tree.map(lambda a: _empty(a, self.num), row)
        start = x, first, rows, jax.tree.map(_zeros, away), _on_host(away, self.num)
        y, _, (out, kept), last, host = self.each(body, start)
        return (y, out), (params, constants, x, context, (kept, last, host))

    def backward(self, saved, cotangents):
        """Return gradients of the arguments; the last layer comes first."""
        params, constants, x, context, (kept, ahead, host) = saved
        dy, (daux, *_) = cotangents
        stacks = params, constants
        last = self.gathered(stacks, self.num - 1)
        vjp = self.vjp(last, x, (context, _row(constants, 0)))

        def gradients(now, constants, kept, dy, daux):
            floats, others = _split(now)
            kept = self.joined(vjp, *kept)
            return vjp.backward(floats, (others, (context, constants)), kept, (dy, daux))

        late = self.layer.leave_sums is not None
        # XLA makes a write an asynchronous copy only where its row is linear in the loop's counter, without a bound.
        most = self.num - 1 if self.lowering.bounds_written_rows else self.num + 1

        def reduced(waiting, shards):
            """Return shards that are to be summed over replicas with the next layer, and a layer's whole gradients."""
            scattered = self.scattered(stacks, waiting)
            return (scattered, self.summed(params, shards)) if late else ((), scattered)

        def body(i, given, carry):
            dx, now, waiting, shards, grads, away = carry
            constant, row, aux, before = given
            ahead = _to(jax.memory.Space.Device, before)
            own, dx = gradients(now, constant, (row, away), dx, aux)
            row, waiting = self.delayed(_row(stacks, self.bounded(i - 1)), waiting, now, own)
            shards, whole = reduced(waiting, shards)
            grads = _put(grads, whole, jnp.minimum(i + 1 + late, most))
            return dx, self.layer.gather(*row), own, shards, grads, ahead

        constant, row = _row((constants, kept), 0)
        waiting, _ = jax.eval_shape(gradients, last, constant, (row, ahead), dy, daux[0])
        shards = jax.eval_shape(functools.partial(self.scattered, stacks), waiting)
        shards, whole = jax.eval_shape(reduced, waiting, shards)
        grads = jax.tree.map(lambda a: _empty(a, self.num), whole)
        carry = dy, last, *jax.tree.map(_zeros, (waiting, shards)), grads, ahead
        carry = self.each_from_last(body, (constants, kept, daux, host), carry)
        dx, _, waiting, shards, grads, _ = carry
        shards, whole = reduced(waiting, shards)
        grads = _put(grads, whole, min(int(late), self.num - 1))
        if late:
            grads = _put(grads, self.summed(params, shards), 0)
        nothing = jax.tree.map(_no_gradient, (constants, context))
        return grads, nothing[0], dx, nothing[1]

    def parted(self, vjp: LayerVJP, kept: list) -> tuple[list, list]:
        """Return what of `vjp.kept` stays on the device, and what goes to the host."""
        away = [name in self.offload for name in vjp.names]
        pairs = list(zip(kept, away, strict=True))
        return [a for a, goes in pairs if not goes], [a for a, goes in pairs if goes]

    def joined(self, vjp: LayerVJP, here: list, away: list) -> list:
        """Undo `parted`."""
        rest = {False: iter(here), True: iter(away)}
        return [next(rest[name in self.offload]) for name in vjp.names]

    def scattered(self, stacks: tuple, waiting: list) -> Any:
        """Run the transpose of a layer's all-gathers, which no value of a parameter enters."""
        own, constants = _row(stacks, 0)
        own = own if self.layer.leave_sums is None else self.layer.leave_sums(own)
        pull_back = jax.vjp(lambda own: _split(self.layer.gather(own, constants))[0], own)[1]
        return pull_back(waiting)[0]

    def summed(self, params: Any, shards: Any) -> Any:
        """Sum a layer's scattered gradients over replicas."""
        assert self.layer.leave_sums is not None
        return jax.vjp(self.layer.leave_sums, _row(params, 0))[1](shards)[0]

    def bounded(self, i: jax.Array) -> jax.Array:
        """Return the place of a layer's parameters in their stacks: bounded where no copy engine should move them."""
        return i if self.lowering.copies_rows else jnp.clip(i, 0, self.num - 1)

    def each(self, body: Callable, carry: Any) -> Any:
        """Run `carry = body(i, carry)` for each layer i: a scan that writes into stacks nobody has set to zero.

        XLA copies rows of stacks beside other work if the loop's own counter tells where. For that it counts from 1,
        the row ahead: the next value of a counter from 0 would be that row's place, computed apart.
        """
        first = int(self.lowering.copies_rows)

        def step(state):
            i, carry = state
            return i + 1, body(i - first, carry)

        with self.unrolled():
            last = self.num + first
            return jax.lax.while_loop(lambda state: state[0] < last, step, (first, carry))[1]

    def each_from_last(self, body: Callable, rows: Any, carry: Any) -> Any:
        """Run `carry = body(i, row i of rows, carry)` for each layer i, the last one first."""
        if not self.lowering.copies_rows:

            def scanned(carry, given):
                return body(*given, carry), None

            given = jnp.arange(self.num), rows
            with self.unrolled():
                return jax.lax.scan(scanned, carry, given, reverse=True)[0]

        def step(done, carry):
            i = self.num - 1 - done
            return body(i, _row(rows, i), carry)

        return self.each(step, carry)

    def unrolled(self) -> contextlib.AbstractContextManager:
        """Mark the loops inside; XLA unrolls them where `xla_gpu_enable_while_loop_unrolling` is manual."""
        unrolls = self.lowering.unrolls
        return set_xla_metadata(
            **({"_xla_loop_unroll_strategy": "double-buffer"} if unrolls else {})
        )

    def delayed(self, row: tuple, waiting: list, now: Any, own: list) -> tuple[tuple, list]:
        """Return a row of the stacks, and gradients that wait to be scattered, which `delay` lets travel later.

        `own` are the gradients of this layer's parameters `now`.
        """
        delay = self.lowering.delay
        if delay is None:
            return row, waiting
        floats = [path for path, leaf in jax.tree.leaves_with_path(now) if _is_float(leaf)]
        parts = [_part(path) for path in floats]
        if delay.until not in parts:  # a norm without parameters
            return row, waiting
        until = own[parts.index(delay.until)]
        late = [leaf for path, leaf in jax.tree.leaves_with_path(row[0]) if self.is_late(path)]
        held = waiting if delay.scatters else []
        late, held, _ = jax.lax.optimization_barrier((late, held, until))
        rest = iter(late)
        params = jax.tree.map_with_path(
            lambda path, leaf: next(rest) if self.is_late(path) else leaf, row[0]
        )
        return (params, row[1]), held or waiting

    def is_late(self, path: tuple) -> bool:
        """Return whether the parameter at `path` is gathered when `delay` says."""
        delay = self.lowering.delay
        return delay is not None and (delay.gathers is None or _part(path) in delay.gathers)

    def gathered(self, stacks, i):
        """Return the parameters of layer `i` as it uses them."""
        return self.layer.gather(*_row(stacks, i))

    def vjp(self, gathered, x, around) -> LayerVJP:
        """Make the layer's backward pass; what has no gradient among its parameters, as fp8 values, is context."""
        leaves, tree = jax.tree.flatten(gathered)
        are_floats = [_is_float(leaf) for leaf in leaves]

        def run(floats, x, around):
            others, own = around
            given = {True: iter(floats), False: iter(others)}
            leaves = [next(given[is_float]) for is_float in are_floats]
            return self.layer.run(jax.tree.unflatten(tree, leaves), x, *own)

        floats, others = _split(gathered)
        return LayerVJP(run, floats, x, (others, around), split=False)


def _part(path: tuple) -> str:
    """Return the first name of a leaf's path."""
    return jax.tree_util.keystr(path[:1], simple=True)


def _row(stacks: Any, i: jax.Array | int) -> Any:
    """Return row `i`, bounded to the rows that there are."""
    return jax.tree.map(
        lambda stack: jax.lax.dynamic_index_in_dim(
            stack, i, 0, keepdims=False, allow_negative_indices=False
        ),
        stacks,
    )


def _put(stacks: Any, row: Any, i: jax.Array | int) -> Any:
    """Write row `i`, bounded to the rows that there are."""
    return jax.tree.map(
        lambda stack, own: jax.lax.dynamic_update_index_in_dim(
            stack, own, i, 0, allow_negative_indices=False
        ),
        stacks,
        row,
    )


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _split(tree: Any) -> tuple[list, list]:
    """Return the leaves of floats, and the others."""
    leaves = jax.tree.leaves(tree)
    return [a for a in leaves if _is_float(a)], [a for a in leaves if not _is_float(a)]


def _zeros(like: Any, num: int | None = None) -> jax.Array:
    """Make zeros of a type, or a stack of `num` such."""
    rows = () if num is None else (num,)
    return jnp.zeros((*rows, *like.shape), like.dtype, out_sharding=_stacked(like, len(rows)))


def _empty(like: Any, num: int) -> jax.Array:
    """Make a stack of `num` arrays of a type, to be written before it is read.

    Zeros would be written, once and again for each further stack of the same type: 2% of the time of Llama 3 8B.
    """
    spec = _stacked(like, 1)
    if spec.reduced:
        return _zeros(like, num)
    # Each device's partial sums are first a row of their own.
    axes = tuple(sorted(spec.unreduced))
    rows = P(axes, *spec.partitions) if axes else spec
    shape = (mesh_size(*axes),) * bool(axes) + (num, *like.shape)
    own = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), rows).shard_shape(shape)
    # Outside of a region XLA would allocate the whole on each device.
    array = smap(lambda: jax.lax.empty(own, like.dtype), in_specs=(), out_specs=rows)()
    return jax.lax.reduce_sum(array, (0,), out_sharding=spec) if axes else array


def _on_host(rows: list, num: int) -> list:
    """Make a stack of `num` rows of each type in the host's memory; XLA does not fill it.

    The values differ, for XLA would take equal ones for one stack and copy it.
    """
    stacks = [
        jnp.full((num, *a.shape), n, a.dtype, out_sharding=_stacked(a, 1))
        for n, a in enumerate(rows)
    ]
    return _to(jax.memory.Space.Host, stacks)


def _to(space: jax.memory.Space, rows: list) -> list:
    """Move arrays to the memory of the device, or of the host."""
    return [jax.device_put(a, space) for a in rows]


def _stacked(like: Any, dims: int) -> P:
    """Return the sharding of a type with `dims` more in front, which are whole."""
    spec = P() if like.sharding is None else like.sharding.spec
    parts = (None,) * dims
    return P(*parts, *spec.partitions, reduced=spec.reduced, unreduced=spec.unreduced)


def _no_gradient(x: jax.Array) -> Any:
    return jnp.zeros_like(x) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0)
