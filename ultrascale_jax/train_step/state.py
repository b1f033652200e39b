"""Make the training state, shard it at rest, and convert it to and from the layout of checkpoints.

In a pipeline the stacked layers rest in the order of its stages: rank after rank, and on each rank stage after stage.
All stages have the length of the longest; layers of zeros pad the others. Zeros pad a vocabulary, too, that the mesh
does not divide. A checkpoint does not depend on the mesh: it holds each stack `[L, ...]` in the order of the layers,
and of a vocabulary the words.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any
from typing import cast as typed

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import Config, require
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.layers import map_params
from ultrascale_jax.models.lora import add_adapters
from ultrascale_jax.models.partition import combine, partition, split_adapters
from ultrascale_jax.models.transformer import Transformer, map_with_order
from ultrascale_jax.parallel.pipeline import schedules
from ultrascale_jax.parallel.pipeline.schedules import LayerOrder
from ultrascale_jax.sharding.memories import device_sharding, host_sharding, on_device
from ultrascale_jax.sharding.mesh import abstract_mesh, check_mesh
from ultrascale_jax.sharding.primitives import cast
from ultrascale_jax.sharding.rules import act, check_shards, stored_spec
from ultrascale_jax.train_step import offload
from ultrascale_jax.train_step.loss_scale import LossScale
from ultrascale_jax.train_step.optim import optimizer
from ultrascale_jax.train_step.precision import COMPUTE
from ultrascale_jax.train_step.rounding import in_storage_type
from ultrascale_jax.train_step.spikes import Spikes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state that a checkpoint must hold to continue a run, except the data position, which is `step`."""

    params: Transformer
    """Master parameters that are trained: all, or with `train.lora` the adapters. They are float32, or matrices of the
    layers in `optim.weight_dtype`."""
    opt_state: Any
    """Optimizer state, sharded like the parameters."""
    step: jax.Array
    """Steps taken, skipped ones included; int32."""
    skipped: jax.Array
    """Steps whose loss, gradient norm or update was not finite, or that were spikes; int32."""
    skipped_in_a_row: jax.Array
    """Skipped steps since the last good one, in float16 only those that the loss scale cannot explain; int32."""
    loss_scale: LossScale | None
    """The loss scale, in float16."""
    spikes: Spikes | None = None
    """With `watch.spike_sigma` the last steps' losses and gradient norms."""
    frozen: Transformer | None = None
    """With `train.lora` the model without adapters, in the type of compute. No part of a checkpoint."""
    reference: Transformer | None = None
    """A frozen model that the loss reads, in the type of compute: the teacher of `train.distill`, or with `train.dpo`
    and no adapters the model that the run begins with. No part of a checkpoint."""

    @property
    def model(self) -> Transformer:
        """The whole model that is trained: what is not among `params` is frozen."""
        return self.params if self.frozen is None else combine(self.params, self.frozen)

    def without_frozen(self) -> "TrainState":
        """Return the state without the models that are no part of a checkpoint."""
        return dataclasses.replace(self, frozen=None, reference=None)


def check_model(model: Any) -> None:
    """Refuse what is no class of models."""
    is_model = isinstance(model, type) and issubclass(model, Transformer)
    require(is_model, "model", model, "must be Transformer or a subclass of it, not an instance")


def initial_state(cfg: Config, model: type[Transformer] = Transformer) -> TrainState:
    """Make a fresh state inside the current mesh; call it under `jax.jit`."""

    def at_rest(value, dims, act_dims):
        if cfg.train.zero:
            check_shards(dims, value.shape)
        return jax.reshard(value, stored_spec(dims, value.shape, zero=cfg.train.zero))

    key, orders = jax.random.key(cfg.train.seed), None
    if (order := schedules.order_of_config(cfg)) is not None:
        orders = schedules.stack_orders(order, cfg.mesh.pp, cfg.model.dense_layers)
    made = model(cfg.model, key, orders, kernels=cfg.kernels)
    if cfg.train.lora.enabled:
        made = add_adapters(made, cfg.train.lora, jax.random.fold_in(key, 1))
    state = fresh_state(cfg, map_params(at_rest, made))
    if not cfg.train.distill.enabled or cfg.train.distill.stored:
        return state
    teacher = Transformer(cfg.teacher.model, jax.random.fold_in(key, 2), kernels=cfg.kernels)
    return dataclasses.replace(state, reference=_in_compute_type(cfg, map_params(at_rest, teacher)))


def _trained_state(cfg: Config, model: type[Transformer]) -> TrainState:
    return initial_state(cfg, model).without_frozen()


def fresh_state(cfg: Config, model: Transformer) -> TrainState:
    """Make the state, without a teacher, of a run that begins with these parameters; call it under `jax.jit`."""
    params, zero = in_storage_type(cfg, model), jnp.int32(0)
    frozen = reference = None
    if cfg.train.lora.enabled:
        params, base = split_adapters(model)
        frozen = _in_compute_type(cfg, base)
    elif cfg.train.dpo.has_reference:
        reference = _in_compute_type(cfg, model)
    opt_state = _fresh_optimizer(cfg, params)
    return TrainState(params, opt_state, zero, zero, zero, *carried(cfg), frozen, reference)


def _in_compute_type(cfg: Config, model: Transformer) -> Transformer:
    """Return a frozen model as it rests."""
    dtype = COMPUTE[cfg.train.precision]
    return map_params(lambda value, dims, act_dims: cast(value, dims, dtype), model)


def _fresh_optimizer(cfg: Config, params: Transformer) -> Any:
    """Return the optimizer's state of the trained parameters."""
    model = type(params)
    trained, frozen = partition(params, model.is_trained)
    chooses = model.is_trained is not Transformer.is_trained and not cfg.train.lora.enabled
    fix = "freezes no parameter of this run; it gets paths as `embed` and `stacks.0.attn.w_q`"
    freezes = bool(jax.tree.leaves(frozen))
    require(freezes or not chooses, "model.is_trained", model.__name__, fix)
    shapes = [x.shape for x in jax.tree.leaves(trained)]
    require(bool(shapes), "model.is_trained", model.__name__, "trains no parameter of this run")
    chosen = model.make_optimizer(cfg)
    is_optimizer = chosen is None or (hasattr(chosen, "init") and hasattr(chosen, "update"))
    fix = (
        f"returned {chosen!r}; must return an optax.GradientTransformation, or None for cfg.optim's"
    )
    require(is_optimizer, "model.make_optimizer", model.__name__, fix)
    init: Callable = (chosen or optimizer(cfg)).init
    opt_state = init(trained)
    if chosen is None:
        opt_state = offload.to_host(opt_state, trained, cfg.optim.offload)
    else:
        fix = f"{model.__name__} has an optimizer of its own; use none"
        require(cfg.optim.offload == "none", "optim.offload", cfg.optim.offload, fix)
        unlike = [x.shape for x in jax.tree.leaves(opt_state) if x.ndim and x.shape not in shapes]
        fix = "an optimizer's state has arrays in the shapes of the parameters, and scalars; others have no sharding"
        require(not unlike, "model.make_optimizer", model.__name__, f"{fix}: {unlike[:3]}")
    return opt_state


def carried(cfg: Config) -> tuple[LossScale | None, Spikes | None]:
    """Make the last two parts of a fresh state, which depend on compute dtype and spike guard."""
    return LossScale.start(cfg.train), Spikes.start(cfg.watch)


def saved_shapes(abstract: TrainState, saved: Config) -> TrainState:
    """Return `abstract` with the parts that a checkpoint of `saved` holds."""

    def place(s: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=abstract.step.sharding)

    loss_scale, spikes = jax.tree.map(place, jax.eval_shape(lambda: carried(saved)))
    saved_state = dataclasses.replace(abstract, loss_scale=loss_scale, spikes=spikes)
    return saved_state.without_frozen()


def reset_optional_state(state: TrainState, abstract: TrainState, cfg: Config) -> TrainState:
    """Return a checkpoint's state with the parts that `abstract` has; make a part fresh if the two differ."""

    def part(saved, fresh, like):
        form = [(s.shape, s.dtype) for s in jax.tree.leaves(like)]
        if [(x.shape, x.dtype) for x in jax.tree.leaves(saved)] == form:
            return saved
        return jax.device_put(fresh, jax.tree.map(lambda s: s.sharding, like))

    loss_scale, spikes = carried(cfg)
    return dataclasses.replace(
        state,
        loss_scale=part(state.loss_scale, loss_scale, abstract.loss_scale),
        spikes=part(state.spikes, spikes, abstract.spikes),
    )


@functools.lru_cache(maxsize=1)  # a run makes shapes, and then a state
def _check_own_layers(cfg: Config, model: type[Transformer]) -> None:
    """Trace layers of the user's without the pipeline.

    There JAX refuses a product or a sum over a split dim that the primitives do not make. In the pipeline's manual
    region it would take a device's shard for the whole, in silence.
    """
    if cfg.mesh.pp == 1 or not model.layers.own:
        return
    sizes = dataclasses.replace(cfg.mesh, pp=1, dp=cfg.mesh.dp * cfg.mesh.pp)
    rows = sizes.batch * -(-cfg.train.global_batch // cfg.train.microbatches // sizes.batch)
    mesh, shape = abstract_mesh(sizes), (rows, cfg.data.seq_len)
    positions = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, act("BT")))

    def run(positions_BT):
        made = model(cfg.model, jax.random.key(0), kernels=cfg.kernels)
        dtype = COMPUTE[cfg.train.precision]
        inputs = LayerInputs.of(cfg.model, positions_BT, context=cfg.cp, dtype=dtype)
        return made(positions_BT, inputs).x_BRD

    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(run, positions)


def init_state(
    cfg: Config, mesh: Mesh, model: type[Transformer] = Transformer, *, frozen: bool = True
) -> TrainState:
    """Make a fresh state of a `model` on the devices of `mesh`; each device makes only its own shards.

    Without `frozen` it has no frozen models, which are loaded.
    """
    # It runs once. At LLVM's -O1 the random numbers compile in a third of the time, to the same bits.
    options = {"xla_backend_optimization_level": 1}
    check_mesh(cfg.mesh, mesh)
    check_model(model)
    _check_own_layers(cfg, model)
    with jax.set_mesh(mesh):
        make = jax.jit(
            initial_state if frozen else _trained_state,
            static_argnums=(0, 1),
            compiler_options=options,
        )
        return make(cfg, model)


def abstract_state(
    cfg: Config, mesh: Mesh | AbstractMesh, model: type[Transformer] = Transformer
) -> TrainState:
    """Return shapes, types and shardings of the state of a `model`, without allocating anything."""
    check_mesh(cfg.mesh, mesh)
    check_model(model)
    _check_own_layers(cfg, model)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        state = jax.eval_shape(lambda: initial_state(cfg, model))

    def place(s: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # eval_shape leaves the sharding of a value out that is whole on every device.
        spec = s.sharding.spec if s.sharding else P()
        return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec))

    def move(s: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=host_sharding(s.sharding))

    placed = jax.tree.map(place, state)
    trained, _ = partition(placed.params, type(placed.params).is_trained)
    moved = offload.map_named(move, placed.opt_state, trained, cfg.optim.offload)
    return dataclasses.replace(placed, opt_state=moved)


def to_checkpoint_layout[Tree](tree: Tree) -> Tree:
    """Convert a state, or a model, to the layout of a checkpoint; copy only arrays that have another there.

    On the devices: between two steps the room of the step's gradients and activations is free.
    """

    def move(layout: _DimLayout, x: jax.Array) -> jax.Array:
        sharding = _travelling(x, layout.dim)
        return _take(x, layout.dim, layout.places, sharding, sharding)

    return _map_moving(move, tree)


def checkpoint_layout_shapes[Tree](tree: Tree) -> Tree:
    """Return the shapes and shardings of `to_checkpoint_layout` for these arrays."""

    def move(layout: _DimLayout, s: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (*s.shape[: layout.dim], len(layout.places), *s.shape[layout.dim + 1 :])
        return jax.ShapeDtypeStruct(shape, s.dtype, sharding=_travelling(s, layout.dim))

    return _map_moving(move, tree)


def gather_stages(model: Transformer) -> Transformer:
    """Return the model of a pipeline with all layers, in their order, on each of its ranks: to be called as a whole.

    Each rank then holds the parameters of all stages. A model without a pipeline is returned as it is.
    """
    if not model.staged:
        return model

    def gather(order: LayerOrder | None, stack: jax.Array) -> jax.Array:
        if order is None:
            return stack
        stored = typed(NamedSharding, stack.sharding)
        every_rank = NamedSharding(stored.mesh, P(None, *stored.spec[1:]))
        return _take(stack, 0, _DimLayout.of_layers(order).places, every_rank, every_rank)

    gathered = copy.copy(map_with_order(gather, model))
    gathered.staged, gathered.orders = False, tuple(map(tuple, model.cfg.stacks))
    return gathered


def from_checkpoint_layout[Tree](tree: Tree, like: Tree) -> Tree:
    """Invert `to_checkpoint_layout`, in the shardings of `like`; free the arrays of `tree` that it copies."""

    def move(layout: _DimLayout, s: jax.ShapeDtypeStruct, x: jax.Array) -> jax.Array:
        moved = _take(x, layout.dim, layout.rows, x.sharding, s.sharding)
        x.delete()  # one by one, or the device would hold all of them twice
        return moved

    return _map_moving(move, like, tree)


@dataclasses.dataclass(frozen=True)
class _DimLayout:
    """How a dim of an array rests, and how a checkpoint has it."""

    dim: int
    rows: tuple[int | None, ...] | range
    """For each row at rest its number in a checkpoint; padding has None, or a number beyond it."""
    places: tuple[int, ...] | range
    """For each row in a checkpoint its number at rest."""

    @classmethod
    def of_layers(cls, order: LayerOrder) -> "_DimLayout":
        """Return that of a stack; a checkpoint has its layers in their order."""
        layers = sorted(layer for layer in order if layer is not None)
        rows = (None if layer is None else layers.index(layer) for layer in order)
        return cls(0, tuple(rows), tuple(map(order.index, layers)))

    @property
    def moves(self) -> bool:
        """Whether the two differ."""
        return tuple(self.rows) != tuple(range(len(self.places)))


def _layouts(model: Transformer) -> Transformer:
    """Return the `_DimLayout` of each array of a model, or of moments in its form."""

    def beside(value, dims: str, act_dims: str):
        def of_array(x: jax.Array) -> _DimLayout:
            dim = dims.find("V") if x.ndim else -1
            size = x.shape[dim] if dim >= 0 else 0
            return _DimLayout(dim, range(size), range(min(size, model.cfg.vocab_size)))

        return jax.tree.map(
            of_array, value
        )  # an optimizer may have an empty tree in an array's place

    orders = zip(model.orders, model.stacks, strict=True)
    stacks = [
        jax.tree.map(lambda _, x=order: _DimLayout.of_layers(x), stack) for order, stack in orders
    ]
    return map_params(beside, model.with_stacks(())).with_stacks(stacks)


def _map_moving[Tree](move: Callable, tree: Tree, *trees: Tree) -> Tree:
    """Return `move(layout, array, *arrays of trees)` for arrays that a checkpoint has otherwise.

    Another array is that of the last tree. Moments are models, too, or a list (Muon's) in the order of the trained
    parameters.
    """

    def is_model(x: object) -> bool:
        return isinstance(x, Transformer)

    def leaf(layout: _DimLayout, *arrays):
        return move(layout, *arrays) if layout.moves else arrays[-1]

    params = next(x for x in jax.tree.leaves(tree, is_leaf=is_model) if is_model(x))
    trained, _ = partition(params, params.is_trained)
    layouts = jax.tree.leaves(_layouts(trained))

    def node(path, x, *same):
        if is_model(x):
            return jax.tree.map(leaf, _layouts(x), x, *same)
        in_list = isinstance(path[-1], jax.tree_util.SequenceKey)
        return leaf(layouts[path[-1].idx], x, *same) if in_list else (x, *same)[-1]

    return jax.tree.map_with_path(node, tree, *trees, is_leaf=is_model)


def _travelling(leaf: jax.Array | jax.ShapeDtypeStruct, dim: int) -> NamedSharding:
    """Return a sharding with all of `dim` on each device, and its axes on another dim if they divide one.

    From the sharding at rest to this one is an all-to-all over these axes.
    """
    stored = typed(NamedSharding, leaf.sharding)
    spec = [_axes(part) for part in stored.spec] + [()] * (leaf.ndim - len(stored.spec))
    freed, spec[dim] = spec[dim], ()
    for other in (*range(dim), *range(dim + 1, leaf.ndim)):
        axes = (*spec[other], *freed)
        if leaf.shape[other] % math.prod(stored.mesh.shape[axis] for axis in axes) == 0:
            spec[other] = axes
            break
    return NamedSharding(stored.mesh, P(*spec), memory_kind=stored.memory_kind)


def _axes(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the axes that a part of a spec names."""
    return (part,) if isinstance(part, str) else part or ()


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _take(
    array: jax.Array,
    dim: int,
    rows: tuple[int | None, ...] | range,
    between: NamedSharding,
    sharding: NamedSharding,
) -> jax.Array:
    """Return `rows` of a dim, zeros for None and beyond its end, picked on devices that have all of them."""
    index = np.array([array.shape[dim] if row is None else row for row in rows])
    between = device_sharding(between)
    whole = jax.reshard(on_device(array), between).at[(*[slice(None)] * dim, index)]
    taken = whole.get(mode="fill", fill_value=0, out_sharding=between)
    return jax.device_put(jax.reshard(taken, device_sharding(sharding)), sharding)


def abstract_batch(cfg: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and shardings of one global batch."""
    names = (
        "tokens",
        "targets",
        "positions",
        *(("segment_ids",) if cfg.data.document_mask else ()),
    )
    shape, sharding = (cfg.train.global_batch, cfg.data.seq_len), NamedSharding(mesh, act("BT"))
    arrays: dict[str, tuple] = dict.fromkeys(names, (shape, jnp.int32))
    if k := cfg.train.distill.top_k:
        arrays["teacher_ids"] = (*shape, k), jnp.int32
        arrays["teacher_logps"] = (*shape, k + 1), jnp.float32
    return {name: jax.ShapeDtypeStruct(*kind, sharding=sharding) for name, kind in arrays.items()}
