"""Loss and gradients of a pipeline as functions of global arrays, with the layers in their natural order.

`executor.py` runs inside a region that is manual over the stages, on this device's shards, and returns partial sums.
The functions here make that region: they derive its specs, put layers in the order of the schedule, sum gradients over
the axes that their parameters are unsharded over, and take the mean.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import UserError, require, require_choice, require_type
from ultrascale_jax.config.pipeline import Stash
from ultrascale_jax.parallel.floats import is_float, join_leaves, split_floats
from ultrascale_jax.parallel.pipeline.executor import pipeline
from ultrascale_jax.parallel.pipeline.orders import forward_only
from ultrascale_jax.parallel.pipeline.rows import varying_axes
from ultrascale_jax.parallel.pipeline.schedules import layer_order
from ultrascale_jax.parallel.pipeline.stages import Stages, Tree, check_call, with_auxiliary
from ultrascale_jax.parallel.pipeline.table import Schedule
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.rules import vary

type Reduction = Literal["mean", "sum"]
type Specs = Any


def pipeline_loss(
    layer: Callable[..., Tree],
    embed: Callable[[Tree, Tree], Tree],
    head: Callable[[Tree, Tree, Tree], Any],
    *,
    schedule: Schedule,
    mesh: Mesh | AbstractMesh,
    stage_axis: str,
    batch_axes: str | tuple[str, ...] = (),
    context: Callable[[Tree, Tree], Tree] | None = None,
    reduction: Reduction = "mean",
    block_specs: Specs = None,
    shared_specs: Specs = None,
    batch_specs: Specs = None,
    stash: Stash = "residuals",
) -> Callable[[Tree, Tree, Tree], Any]:
    """Return `(blocks, shared, batches) -> loss`, which `jax.grad` of any surrounding loss differentiates.

    Its arguments are global arrays on `mesh`, of Auto or Explicit axes: `blocks` is a pytree of stacks `[layers, ...]`
    in natural order, `shared` the parameters of embedding and head, `batches` a pytree of `[M, rows, ...]`, for M
    micro-batches. All three have gradients in the dtypes of their arrays, summed in float32, those of `batches` for its
    leaves of floats. The forward pass under `jax.grad` computes them, and the backward pass scales them. Without
    differentiation only forward passes run.
    The functions see this device's rows of one micro-batch, and may use collectives over any axis but the stages'. They
    read no array from outside that is differentiated.

    Args:
      layer: `(params of one layer, x[, context]) -> x | (x, auxiliary loss)`: x is any pytree of floats, the loss a
        scalar that is added to the head's. `jax.checkpoint` around it decides which residuals a stage keeps.
      embed: `(shared, batch) -> x`, the input of the first layer.
      head: `(shared, x, batch) -> loss | (loss, metrics)`: scalars; metrics are not differentiated. A mean over the
        rows of all devices is this device's sum, divided by `jax.lax.pmean` of the number of rows over `batch_axes`.
      schedule: `build_schedule(name, stages, M)`.
      mesh: has `stage_axis`, of as many devices as the schedule has ranks.
      stage_axis: the axis over which layers are split.
      batch_axes: axes over which the rows of a micro-batch are split.
      context: `(shared, batch) -> context` of every layer. Its floats are differentiated, and are sent on with x;
        each stage makes the others itself.
      reduction: `mean` or `sum` of the losses and metrics of all micro-batches and all devices of `batch_axes`.
      block_specs: specs of `blocks`, as `in_specs` of `jax.shard_map`; by default `P(stage_axis)`.
      shared_specs: specs of `shared`; by default `P()`.
      batch_specs: specs of `batches`; by default `P(None, batch_axes)`, and `P()` for a leaf `[M]`.
      stash: `input` keeps only the input of a stage, and runs its forward pass again in the backward pass.

    A rank with several stages holds layers that do not follow each other: each call moves the layers there, and their
    gradients back. Source: `docs/pipelines.md`.

    Raises:
      UserError: an argument does not fit the mesh or the schedule, or a function returns another kind of value.
    """
    program = _Program(
        layer=layer, embed=embed, head=head, schedule=schedule, mesh=mesh, stage_axis=stage_axis,
        batch_axes=batch_axes, context=context, reduction=reduction, block_specs=block_specs,
        shared_specs=shared_specs, batch_specs=batch_specs, stash=stash,
    )  # fmt: skip
    return program.differentiable()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Program:
    """The arguments of `pipeline_loss`, checked, and the region that they make."""

    layer: Callable
    embed: Callable
    head: Callable
    schedule: Schedule
    mesh: Mesh | AbstractMesh
    stage_axis: str
    batch_axes: str | tuple[str, ...]
    context: Callable | None
    reduction: Reduction
    block_specs: Specs
    shared_specs: Specs
    batch_specs: Specs
    stash: Stash

    def __post_init__(self):
        require_choice("reduction", self.reduction, Reduction)
        require_choice("stash", self.stash, Stash)
        require_type("schedule", self.schedule, Schedule, "build_schedule makes one")
        fix = "has no backward operations; build_schedule makes one that trains"
        require(not self.schedule.forward, "schedule", self.schedule.name, fix)
        sizes = dict(self.mesh.shape)
        fix = f"must be an axis of the mesh: {', '.join(map(str, sizes))}"
        require(self.stage_axis in sizes, "stage_axis", self.stage_axis, fix)
        ranks, devices = self.schedule.ranks, sizes[self.stage_axis]
        fix = f"the mesh has {devices} devices on axis {self.stage_axis!r}; build_schedule(name, {devices}, M)"
        require(ranks == devices, "schedule.ranks", ranks, fix)
        other_axes = ", ".join(repr(axis) for axis in sizes if axis != self.stage_axis)
        on_mesh = set(self.rows_axes) <= set(sizes) - {self.stage_axis}
        fix = f"must be other axes of the mesh than the stages': {other_axes or 'it has none'}"
        require(on_mesh, "batch_axes", self.batch_axes, fix)
        with_context = () if self.context is None else ("context",)
        check_call("layer", self.layer, "params", "x", *with_context)
        check_call("embed", self.embed, "shared", "batch")
        check_call("head", self.head, "shared", "x", "batch")
        if self.context is not None:
            check_call("context", self.context, "shared", "batch")

    @property
    def rows_axes(self) -> tuple[str, ...]:
        """`batch_axes` as a tuple."""
        axes = self.batch_axes
        return (axes,) if isinstance(axes, str) else tuple(axes)

    @property
    def row_devices(self) -> int:
        """The number of devices over which the rows of a micro-batch are split."""
        return math.prod(self.mesh.shape[axis] for axis in self.rows_axes)

    def value(self, *arguments: Tree) -> Any:
        """Return the loss, and the metrics if the head has some, by forward operations alone."""
        table = self.schedule
        forward = forward_only(table.ranks, table.virtual, table.placement, table.microbatches)
        return _Call(self, *arguments).run(forward, of_batches=False)[0]

    def differentiable(self) -> Callable[[Tree, Tree, Tree], Any]:
        """Return `value` as a function whose forward pass under `jax.grad` computes the gradients."""

        @jax.custom_vjp
        def loss(blocks: Tree, shared: Tree, batches: Tree):
            return self.value(blocks, shared, batches)

        def forward(*arguments: Tree):
            of_batches = any(leaf.perturbed for leaf in jax.tree.leaves(arguments[2]))
            values = jax.tree.map(lambda leaf: leaf.value, arguments)
            return _Call(self, *values).run(self.schedule, of_batches=of_batches)

        def backward(grads, cotangent):
            scale = cotangent[0] if isinstance(cotangent, tuple) else cotangent
            return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)

        loss.defvjp(forward, backward, symbolic_zeros=True)
        return loss

    def stages(self, shared: Tree, *, of_batches: bool) -> Stages:
        """Return the functions of the executor; its x is a pair of the user's x and the floats of the context."""
        context = self.context or (lambda shared, batch: ())

        def run_layer(params, x, integers):
            x, floats = x
            merged = () if self.context is None else (join_leaves(floats, integers),)
            y, aux, *_ = with_auxiliary(self.layer(params, x, *merged), x)
            return (y, floats), self._scalar("the auxiliary loss of layer", aux)

        def run_embed(shared, batch):
            return self.embed(shared, batch), split_floats(context(shared, batch))[0]

        def run_head(shared, x, batch):
            result = self.head(shared, x[0], batch)
            loss, *metrics = result if isinstance(result, tuple) else (result,)
            loss = self._scalar("the loss of head", loss)
            metrics = jax.tree.map(lambda value: self._scalar("a metric of head", value), metrics)
            return jax.tree.map(lambda value: lax.pmean(value, self.stage_axis), (loss, metrics))

        return Stages(
            layer=run_layer,
            embed=run_embed,
            embed_parts=False,
            head=run_head,
            context=lambda batch: split_floats(context(shared, batch))[1],
            gives_microbatch_gradients=of_batches,
        )

    def _scalar(self, name: str, value: Any) -> jax.Array:
        """Return a float32 scalar typed as differing between devices, of which each contributes its own."""
        require(jnp.shape(value) == (), name, jax.typeof(value), "must be a scalar")
        axes = {self.stage_axis, *self.rows_axes}
        value = jnp.asarray(value, jnp.float32)
        undeclared = sorted(varying_axes(value) - axes)
        fix = "differs between the devices of this axis, which is not in batch_axes; sum it there"
        require(not undeclared, name, undeclared, fix)
        return vary(value, axes)


class _Call:
    """A `_Program` with its arguments, as lists of leaves with a spec for each."""

    def __init__(self, program: _Program, *arguments: Tree):
        self.program = program
        self.explicit = AxisType.Explicit in program.mesh.axis_types
        outside = self.explicit and jax.sharding.get_abstract_mesh().empty
        fix = "has Explicit axes; call this inside `with jax.set_mesh(mesh):`"
        require(not outside, "mesh", program.mesh.axis_names, fix)
        self.trees = [jax.tree.structure(tree) for tree in arguments]
        self.blocks, self.shared, self.batches = map(_arrays, arguments)
        blocks, shared, batches = arguments
        stage, rows = program.stage_axis, program.rows_axes
        per_leaf = jax.tree.map(
            lambda a: P(None, rows) if rows and jnp.ndim(a) > 1 else P(), batches
        )
        self.specs = (
            _specs("block_specs", program.block_specs, P(stage), blocks),
            _specs("shared_specs", program.shared_specs, P(), shared),
            _specs("batch_specs", program.batch_specs, per_leaf, batches),
        )
        self._check_parameters()
        self._check_batches()
        table = program.schedule
        order = layer_order(table.ranks, table.virtual, table.placement, len(self.blocks[0]))
        self.order = order
        self.moves = order != tuple(range(len(order)))

    def run(self, schedule: Schedule, *, of_batches: bool) -> tuple[Any, tuple[Tree, Tree, Tree]]:
        """Return the loss, with the metrics if there are some, and the gradients; None without a backward pass."""
        trains = not schedule.forward
        floats = [i for i, a in enumerate(self.batches) if of_batches and is_float(a)]
        gradient_specs = (*self.specs[:2], [self.specs[2][i] for i in floats])

        def region(blocks, shared, batches):
            blocks, shared, batches = map(jax.tree.unflatten, self.trees, (blocks, shared, batches))
            stages = self.program.stages(shared, of_batches=of_batches)
            out = pipeline(
                schedule, stages, blocks, shared, batches,
                stash=self.program.stash, order=self.order, axis=self.program.stage_axis,
            )  # fmt: skip
            value = self._value(out)
            if not trains:
                return value, None
            grads = map(jax.tree.leaves, (out.blocks, out.shared, out.microbatches))
            return value, [
                [self._reduced(g, spec) for g, spec in zip(leaves, specs, strict=True)]
                for leaves, specs in zip(grads, gradient_specs, strict=True)
            ]

        mapped = smap(
            region, mesh=self.program.mesh, in_specs=self.specs,
            out_specs=(P(), list(gradient_specs) if trains else None),
        )  # fmt: skip
        inputs = [
            [self._placed(a, spec) for a, spec in zip(leaves, specs, strict=True)]
            for leaves, specs in zip(self._arguments(), self.specs, strict=True)
        ]
        value, grads = jax.jit(mapped)(*inputs)
        value = value if len(value) > 1 else value[0]
        return value, self._gradients(grads, floats) if trains else (None, None, None)

    def _value(self, out) -> tuple:
        """Return the loss and the metrics, summed over the pipeline and the devices, times the scale."""
        program = self.program
        axes = (program.stage_axis, *program.rows_axes)
        auxiliary = lax.psum(vary(out.auxiliary, axes), axes)
        objective, metrics = out.objective, out.metrics
        if program.rows_axes:
            objective, metrics = lax.psum((objective, metrics), program.rows_axes)
        values = (objective + auxiliary, *metrics)
        return jax.tree.map(lambda a: a * self._scale, values)

    @property
    def _scale(self) -> float:
        count = self.program.schedule.microbatches * self.program.row_devices
        return 1 / count if self.program.reduction == "mean" else 1.0

    def _reduced(self, gradient: jax.Array, spec: P) -> jax.Array:
        """Sum a gradient over the axes that its parameter is unsharded over."""
        axes = tuple(sorted(varying_axes(gradient) - _axes(spec)))
        return self._scale * (lax.psum(gradient, axes) if axes else gradient)

    def _arguments(self) -> tuple[list, list, list]:
        """Return the leaves of the arguments, the layers in the order of the schedule."""
        # Padding is masked: any layer may stand there.
        rows = jnp.asarray([0 if layer is None else layer for layer in self.order])
        blocks = [
            self._take(a, rows, spec) if self.moves else a
            for a, spec in zip(self.blocks, self.specs[0], strict=True)
        ]
        return blocks, self.shared, self.batches

    def _gradients(self, grads: list, floats: list[int]) -> tuple[Tree, Tree, Tree]:
        """Return the gradients as trees like the arguments, in the natural order of the layers."""
        blocks, shared, of_floats = grads
        if self.moves:
            rows = jnp.asarray([self.order.index(i) for i in range(len(self.blocks[0]))])
            at_rest = [jax.typeof(a).sharding.spec for a in self.blocks]
            specs = at_rest if self.explicit else self.specs[0]
            blocks = [self._take(g, rows, spec) for g, spec in zip(blocks, specs, strict=True)]
        batches: list = [None] * len(self.batches)
        for place, gradient in zip(floats, of_floats, strict=True):
            batches[place] = self._like(gradient, self.batches[place])
        blocks = map(self._like, blocks, self.blocks)
        shared = map(self._like, shared, self.shared)
        return tuple(map(jax.tree.unflatten, self.trees, (blocks, shared, batches)))

    def _take(self, a: jax.Array, rows: jax.Array, spec: P) -> jax.Array:
        """Return these rows of a stack, sharded as `spec` says."""
        sharding = NamedSharding(self.program.mesh, spec)
        if self.explicit:
            return a.at[rows].get(out_sharding=sharding)
        divides = len(rows) % self.program.schedule.ranks == 0
        return lax.with_sharding_constraint(a[rows], sharding) if divides else a[rows]

    def _placed(self, a: jax.Array, spec: P) -> jax.Array:
        """Return an array in the sharding in which it enters the region; on Auto axes JAX does that itself."""
        return jax.reshard(a, NamedSharding(self.program.mesh, spec)) if self.explicit else a

    def _like(self, gradient: jax.Array, parameter: jax.Array) -> jax.Array:
        """Return a gradient in the dtype and the sharding of its parameter."""
        gradient = gradient.astype(parameter.dtype)
        if not self.explicit:
            return gradient
        spec = jax.typeof(parameter).sharding.spec
        return jax.reshard(gradient, NamedSharding(self.program.mesh, spec))

    def _check_parameters(self) -> None:
        """Refuse parameters without gradients, and stacks of different or too few layers."""
        for name, leaves in (("blocks", self.blocks), ("shared", self.shared)):
            non_floats = [jax.typeof(a) for a in leaves if not is_float(a)]
            fix = "must hold floats alone; give integers in the batches"
            require(not non_floats, name, non_floats, fix)
        counts = sorted({jnp.shape(a)[0] if jnp.ndim(a) else 0 for a in self.blocks})
        require(len(counts) == 1, "blocks", counts, "leaves must be stacks of one number of layers")
        ranks = self.program.schedule.ranks
        fix = f"the schedule has {ranks} ranks, which want a layer each"
        require(counts[0] >= ranks, "layers of blocks", counts[0], fix)
        for spec in self.specs[0]:
            first = spec[0] if len(spec) else None
            fix = f"must begin with {self.program.stage_axis!r}, the axis that splits the layers"
            require(first == self.program.stage_axis, "block_specs", spec, fix)
        for name, specs in (("shared_specs", self.specs[1]), ("batch_specs", self.specs[2])):
            for spec in specs:
                fix = "shared parameters and batches are the same on all stages; leave the axis out"
                require(self.program.stage_axis not in _axes(spec), name, spec, fix)

    def _check_batches(self) -> None:
        """Refuse batches of another number of micro-batches, or that do not divide over the devices."""
        m, axes = self.program.schedule.microbatches, self.program.rows_axes
        counts = sorted({jnp.shape(a)[0] if jnp.ndim(a) else 0 for a in self.batches})
        fix = f"the schedule has {m} micro-batches; leaves are [{m}, rows of one, ...]"
        require(counts == [m], "micro-batches", counts, fix)
        rows = sorted({jnp.shape(a)[1] for a in self.batches if jnp.ndim(a) > 1})
        if not axes or self.program.batch_specs is not None:
            return
        fix = f"dim 1 of each leaf of batches is split over {axes}; give batch_specs"
        require(len(rows) < 2, "rows of a micro-batch", rows, fix)
        devices = self.program.row_devices
        fix = f"must be divisible by the {devices} devices of {axes}"
        require(not rows or rows[0] % devices == 0, "rows of a micro-batch", rows[0], fix)


def _arrays(tree: Tree) -> list[jax.Array]:
    """Return the leaves of a tree as arrays."""
    return [jnp.asarray(a) for a in jax.tree.leaves(tree)]


def _axes(spec: P) -> set[str]:
    """Return the mesh axes of a spec."""
    parts = (part if isinstance(part, tuple) else (part,) for part in spec)
    return {axis for part in parts for axis in part if axis is not None}


def _specs(name: str, specs: Specs, default: Specs, tree: Tree) -> list[P]:
    """Return a spec for each leaf of a tree, of a tree that may stop at a common one."""
    chosen = default if specs is None else specs
    try:
        full = jax.tree.broadcast(chosen, tree, is_leaf=_is_spec)
    except ValueError:
        fix = f"must be a spec, or a tree of specs like its argument, {jax.tree.structure(tree)}"
        raise UserError(f"{name}={specs}: {fix}") from None
    return jax.tree.leaves(full, is_leaf=_is_spec)


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)
