"""A scan over layers that gathers the next layer's parameters ahead and scatters a layer's gradients late (ZeRO-3).

    an iteration, forward          an iteration, backward
    1. gather layer i + 1          1. compute the gradients of layer i
    2. offload of layer i - 1      2. gather layer i - 1
    3. compute layer i             3. reduce-scatter the gradients of layer i + 1
                                   4. sum layer i + 2's over replicas, and store them

The steps of an iteration do not wait for each other, so its collectives overlap with the products of layer i. An
iteration of a plain scan waits for its own gathers. The price is memory: one more layer of gathered parameters, one
layer of unreduced gradients, and one of their shards.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import jax

from ultrascale_jax.config.lowering import Lowering
from ultrascale_jax.kernels.xla import compute_together
from ultrascale_jax.parallel.floats import join_leaves, split_leaves
from ultrascale_jax.parallel.layer_vjp import LayerVJP
from ultrascale_jax.parallel.row_loop import (
    RowLoop,
    empty_stack,
    host_stacks,
    move,
    read_row,
    write_row,
    zeros,
)
from ultrascale_jax.parallel.scanned_layer import (
    ScannedLayer,
    check_options,
    num_layers,
    without_gradient,
)

PLAIN = Lowering.plain()


class Forward(NamedTuple):
    """Carry of the forward loop, at the beginning of layer i."""

    x: jax.Array
    """Its input."""
    gathered: Any
    """Its parameters, gathered."""
    rows: Any
    """Stacks of results and of residuals on the device, written up to layer i - 1."""
    leaving: list
    """Residuals of layer i - 1 for the host, still on the device."""
    host: list
    """Stacks in the host's memory; row i is that of layer i - 1, so that its place is the loop's counter."""


class Backward(NamedTuple):
    """Carry of the backward loop, at the beginning of layer i."""

    dy: jax.Array
    """Gradient of its result."""
    gathered: Any
    """Its parameters, gathered."""
    unscattered: list
    """Gradients of layer i + 1 before their reduce-scatter."""
    unsummed: Any
    """Shards of the gradients of layer i + 2, before their sum over replicas; empty without `Layer.leave_sums`."""
    gradients: Any
    """Stacks of gradients."""
    kept_on_host: list
    """Residuals of the layer that were on the host, back on the device."""


def prefetch_scan(
    layer: Callable[..., Any],
    params: Any,
    x: jax.Array,
    *,
    gather: Callable[..., Any],
    constants: Any = None,
    context: Any = None,
    leave_sums: Callable[[Any], Any] | None = None,
    lowering: Lowering = PLAIN,
    offload: Collection[str] = (),
    waits: bool = False,
) -> tuple[jax.Array, Any]:
    """Run a layer for each row of `params`, in order, with the next row gathered while this one computes.

    Without `lowering` it is slower on GPUs than `jax.lax.scan`: XLA overlaps collectives by options alone. Take
    `lowering = Lowering.gather_ahead(shards)` and `jax.jit(..., compiler_options=lowering.xla_options)`.

    Args:
      layer: `(gathered, x[, context][, constants]) -> y` or `-> (y, aux[, statistics])`, with the given ones of
        the two, and no closure over a value that is differentiated. y has x's type; aux is a tree of float arrays, and
        is differentiated; statistics, any tree, are not.
      params: a tree of float arrays with a leading dim of layers, sharded as they are stored.
      x: the first layer's input, one array.
      gather: `(params[, constants]) -> gathered` of one layer: its all-gathers, whose transpose is the reduce-scatters.
        On an Explicit mesh `jax.reshard(p, P(None, None))`, or `P(None, None, reduced={axis})` if p is in products
        only: its gradient is then a partial sum until it is scattered. In `jax.shard_map` `jax.lax.all_gather`.
      constants: a tree with a leading dim of layers, of any types, as of frozen parameters, which must not be
        differentiated: no gathered array that follows from it alone has a gradient.
      context: a tree that every layer gets, which must not be differentiated.
      leave_sums: `params -> params` of one layer, typed so that the transpose of `gather` leaves sums over replicas to
        the transpose of this. Without it the transpose of `gather` sums over them too.
      lowering: how XLA runs the scan.
      offload: names (`jax.ad_checkpoint.checkpoint_name`) of residuals that wait for the backward pass in host memory.
        They go there while the next layer computes, and return one layer ahead; the last layer's stay on the device.
      waits: whether the backward pass gathers its first layer only once the gradient of the result is there. XLA may
        else gather it in the forward pass, and keep it while later scans run.

    Returns:
      The last layer's y, and `(aux[, statistics])` of every layer, stacked; aux is 0 if the layer returns y alone.

    Raises:
      UserError: `params` has no arrays, or arrays with other numbers of layers; or the gradient of `constants` or
        `context` is asked for.
    """
    check_options(layer, gather, lowering, offload)
    constants = without_gradient("constants", constants)
    context = without_gradient("context", context)
    functions = ScannedLayer.of(layer, gather, leave_sums)
    scan = _Scan(functions, (params, constants), lowering, offload, waits)
    return _scanned(scan, params, constants, x, context)


class _Scan:
    """Forward and backward pass of all layers."""

    def __init__(
        self,
        layer: ScannedLayer,
        stacks: tuple[Any, Any],
        lowering: Lowering,
        offload: Collection[str],
        waits: bool,
    ):
        """`stacks` are parameters and constants of all layers; only their types matter."""
        self.layer, self.num = layer, num_layers(*stacks)
        self.trained = layer.trained(*read_row(stacks, 0))
        self.offload, self.waits = offload, waits
        self.loop, self.delay = RowLoop(self.num, lowering), lowering.delay

    def forward(self, params, constants, x, context, *, keep: bool):
        """Return the results of `prefetch_scan`, and the residuals of the backward pass."""
        stacks = params, constants
        first = self.layer.gather(*read_row(stacks, 0))
        vjp = self.vjp(first, x, (context, read_row(constants, 0))) if keep else None

        def compute(x, gathered, static):
            if vjp is None:
                y, *out = self.layer.run(gathered, x, *static)
                return y, (tuple(out), None), []
            trained, fixed = self.split(gathered)
            y, aux, statistics, kept = vjp.forward(trained, x, (fixed, static))
            on_device, on_host = self.part(vjp, kept)
            return y, ((aux, *statistics), on_device), on_host

        def body(i, carry: Forward) -> Forward:
            following = self.layer.gather(*read_row(stacks, self.loop.neighbour(i + 1)))
            host = write_row(carry.host, move(jax.memory.Space.Host, carry.leaving), i)
            static = context, read_row(constants, i)
            y, row, leaving = compute(carry.x, carry.gathered, static)
            return Forward(y, following, write_row(carry.rows, row, i), leaving, host)

        _, row, leaving = jax.eval_shape(compute, x, first, (context, read_row(constants, 0)))
        rows = jax.tree.map(lambda like: empty_stack(like, self.num), row)
        host = host_stacks(leaving, self.num)
        start = Forward(x, first, rows, jax.tree.map(zeros, leaving), host)
        end: Forward = self.loop.each(body, start)
        out, kept = end.rows
        return (end.x, out), (params, constants, x, context, (kept, end.leaving, end.host))

    def backward(self, saved, cotangents):
        """Return gradients of the arguments; the last layer comes first."""
        params, constants, x, context, (kept, last_on_host, host) = saved
        dy, (daux, *_) = cotangents
        stacks = params, constants
        row = read_row(stacks, self.num - 1)
        if self.waits:
            row, dy = compute_together((row, dy))
        last = self.layer.gather(*row)
        vjp = self.vjp(last, x, (context, read_row(constants, 0)))
        # A layer's gradients are finished one iteration after it, or two with a sum over replicas.
        lag = 1 if self.layer.leave_sums is None else 2
        compute = partial(self.pull_back, vjp, context)
        reduce = partial(self.reduce, stacks)

        def body(i, rows, carry: Backward) -> Backward:
            constant, kept, aux, preceding_on_host = rows
            returning = move(jax.memory.Space.Device, preceding_on_host)
            kept = kept, carry.kept_on_host
            dgathered, dx = compute(carry.gathered, constant, kept, carry.dy, aux)
            row = read_row(stacks, self.loop.neighbour(i - 1))
            row, unscattered = self.delayed(row, carry.unscattered, carry.gathered, dgathered)
            unsummed, finished = reduce(unscattered, carry.unsummed)
            gradients = write_row(carry.gradients, finished, self.loop.written(i + lag))
            gathered = self.layer.gather(*row)
            return Backward(dx, gathered, dgathered, unsummed, gradients, returning)

        constant, row = read_row((constants, kept), 0)
        daux_row = jax.tree.map(lambda a: a[0], daux)
        dgathered, _ = jax.eval_shape(compute, last, constant, (row, last_on_host), dy, daux_row)
        start = Backward(dy, last, *self.no_gradients(stacks, dgathered), last_on_host)
        end: Backward = self.loop.each_from_last(body, (constants, kept, daux, host), start)
        unsummed, finished = reduce(end.unscattered, end.unsummed)
        gradients = write_row(end.gradients, finished, min(lag - 1, self.num - 1))
        if lag == 2:
            gradients = write_row(gradients, self.layer.sum(stacks, unsummed), 0)
        return gradients, None, end.dy, None

    def pull_back(self, vjp: LayerVJP, context, gathered, constants, kept, dy, daux):
        """Return gradients of a layer's gathered parameters and of x; `kept` are its residuals as `part` has them."""
        trained, fixed = self.split(gathered)
        static = fixed, (context, constants)
        return vjp.backward(trained, static, self.join(vjp, *kept), (dy, daux))

    def reduce(self, stacks, unscattered, unsummed):
        """Return shards that are summed in the next iteration, and a layer's finished gradients."""
        shards = self.layer.scatter(stacks, self.trained, unscattered)
        if self.layer.leave_sums is None:
            return (), shards
        return shards, self.layer.sum(stacks, unsummed)

    def no_gradients(self, stacks, dgathered: list) -> tuple[list, Any, Any]:
        """Return `unscattered`, `unsummed` and `gradients` of `Backward` before any layer has gradients `dgathered`."""
        scatter = partial(self.layer.scatter, stacks, self.trained)
        shards = jax.eval_shape(scatter, dgathered)
        unsummed, finished = jax.eval_shape(partial(self.reduce, stacks), dgathered, shards)
        gradients = jax.tree.map(lambda like: empty_stack(like, self.num), finished)
        return *jax.tree.map(zeros, (dgathered, unsummed)), gradients

    def part(self, vjp: LayerVJP, kept: list) -> tuple[list, list]:
        """Part a layer's residuals: on the device, and on the host."""
        pairs = list(zip(kept, self.on_host(vjp), strict=True))
        return [a for a, leaves in pairs if not leaves], [a for a, leaves in pairs if leaves]

    def join(self, vjp: LayerVJP, on_device: list, on_host: list) -> list:
        """Undo `part`."""
        arrays = {False: iter(on_device), True: iter(on_host)}
        return [next(arrays[leaves]) for leaves in self.on_host(vjp)]

    def on_host(self, vjp: LayerVJP) -> list[bool]:
        """Return for each residual whether it waits in the host's memory."""
        return [not names.isdisjoint(self.offload) for names in vjp.names]

    def delayed(
        self, row: tuple, unscattered: list, gathered: Any, dgathered: list
    ) -> tuple[tuple, list]:
        """Return a row of the stacks, and unscattered gradients, whose collectives start when `delay` says.

        `dgathered` are the gradients of the current layer's parameters `gathered`.
        """
        delay, trained = self.delay, self.split(gathered)[0]
        parts = [_part(path) for path, _ in jax.tree.leaves_with_path(trained)]
        if delay is None or delay.until not in parts:  # a norm may have no parameters
            return row, unscattered
        until = dgathered[parts.index(delay.until)]

        def is_late(path: tuple) -> bool:
            return delay.gathers is None or _part(path) in delay.gathers

        leaves = jax.tree.leaves_with_path(row[0])
        gathers = [leaf for path, leaf in leaves if is_late(path)]
        scatters = unscattered if delay.scatters else []
        gathers, scatters, _ = compute_together((gathers, scatters, until))
        delayed = iter(gathers)
        params = jax.tree.map_with_path(
            lambda path, leaf: next(delayed) if is_late(path) else leaf, row[0]
        )
        return (params, row[1]), scatters or unscattered

    def vjp(self, gathered, x, static) -> LayerVJP:
        """Build the layer's backward pass; parameters without a gradient, such as fp8 values, are context."""

        def run(trained, x, context):
            fixed, static = context
            return self.layer.run(join_leaves(trained, fixed), x, *static)

        trained, fixed = self.split(gathered)
        return LayerVJP(run, trained, x, (fixed, static))

    def split(self, gathered: Any) -> tuple[Any, Any]:
        """Return the gathered arrays with gradients, and the others."""
        return split_leaves(gathered, self.trained)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scanned(scan: _Scan, *arrays: Any) -> tuple[jax.Array, Any]:
    """Return the results of `prefetch_scan` for params, constants, x and context."""
    return scan.forward(*arrays, keep=False)[0]


_scanned.defvjp(partial(_Scan.forward, keep=True), _Scan.backward)


def _part(path: tuple) -> str:
    """Return the first name of a leaf's path."""
    return jax.tree_util.keystr(path[:1], simple=True)
