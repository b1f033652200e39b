"""Convert states and models to the layout of checkpoints, which does not depend on the mesh, and back.

A checkpoint has each stack `[L, ...]` in the order of the layers, and a vocabulary without padding. In a run the layers
of a pipeline are in the order of its stages, with padding, and zeros pad a vocabulary (`train_step/state.py`).
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import cast as typed

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import Config
from ultrascale_jax.models.layers import map_params
from ultrascale_jax.models.partition import partition
from ultrascale_jax.models.transformer import Transformer, map_with_order
from ultrascale_jax.parallel.pipeline.schedules import LayerOrder
from ultrascale_jax.sharding.memories import device_sharding, on_device
from ultrascale_jax.train_step.state import TrainState, carried


def saved_shapes(abstract: TrainState, saved: Config) -> TrainState:
    """Return `abstract` with the parts that a checkpoint of `saved` holds."""

    def place(s: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=abstract.step.sharding)

    loss_scale, spikes = jax.tree.map(place, jax.eval_shape(lambda: carried(saved)))
    saved_state = dataclasses.replace(abstract, loss_scale=loss_scale, spikes=spikes)
    return saved_state.without_frozen()


def reset_optional_state(state: TrainState, abstract: TrainState, cfg: Config) -> TrainState:
    """Return a checkpoint's state with the parts that `abstract` has; a part that differs is initialized."""

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
    """Return the model of a pipeline with all layers, in their order, on each of its ranks: as one callable model.

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
    """Order of a dim of an array in a run and in a checkpoint."""

    dim: int
    rows: tuple[int | None, ...] | range
    """For each row in a run its number in a checkpoint; padding has None, or a number beyond it."""
    places: tuple[int, ...] | range
    """For each row in a checkpoint its number in a run."""

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

    From the run's sharding to this one is an all-to-all over these axes.
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
