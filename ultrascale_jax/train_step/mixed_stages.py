"""Pipelines of layers of two kinds: the first ones without experts, as DeepSeek-V3's.

In lock step one program runs the layers at a position of all ranks, whatever their kind. It computes attention for both
kinds alike, and then either an MLP or experts. So what both have must lie by position, and is put there once a step:

    at rest    stack 0, dense layers          attention, norms, MLP      few rows a rank (`schedules.stack_orders`)
               stack 1, the other layers      attention, norms, experts  by position; a dense layer's row is padding
    in use     stack 0, all layers            attention, norms, experts  by position; a dense layer's experts are zeros
               stack 1, dense layers          MLP                        few rows a rank, read where one is used

The gradients go the way back.
"""

import copy
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ultrascale_jax.config import require
from ultrascale_jax.models.block import Block, Terms
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.layers import MLP
from ultrascale_jax.models.moe import Routed
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.parallel.pipeline.rows import Rows, either
from ultrascale_jax.parallel.pipeline.schedules import LayerOrder
from ultrascale_jax.sharding.rules import mesh_size


def by_position(params: Transformer, order: LayerOrder) -> Transformer:
    """Return the model in use, of one at rest, on this device's shards; `order` is the pipeline's `layer_order`."""
    (dense, experts), (dense_order, _) = params.stacks, params.orders
    places = _here(dense_order, order)
    whole = jax.tree.map(
        lambda a, rows: a.at[places].set(rows, mode="drop"),
        _without(experts, "moe"),
        _without(dense, "mlp"),
    )
    whole.moe = experts.moe
    model = params.with_stacks([whole, _without(dense, "attn", "attn_norm", "mlp_norm")])
    model.orders = order, dense_order
    return model


def by_stack(grads: Transformer, params: Transformer) -> Transformer:
    """Return gradients of the model in use as those of `params`, which is at rest."""
    (whole, mlp), (order, dense_order) = grads.stacks, grads.orders
    places, both = _here(dense_order, order), _without(whole, "moe")
    dense = jax.tree.map(lambda a: a.at[places].get(mode="fill", fill_value=0), both)
    experts = jax.tree.map(lambda a: a.at[places].set(0, mode="drop"), both)
    dense.mlp, experts.moe = mlp.mlp, whole.moe
    model = grads.with_stacks([dense, experts])
    model.orders = params.orders
    return model


def rows_by_position(model: Transformer) -> list[np.ndarray]:
    """Return the argument `rows` of `executor.pipeline` for the stacks of a model in use."""
    (order, dense_order), ranks = model.orders, mesh_size("pp")
    layers, dense = _by_rank(order, ranks), _by_rank(dense_order, ranks)
    rows = [
        [part.index(i) if i in part else 0 for i in row]
        for row, part in zip(layers, dense, strict=True)
    ]
    tables = [np.arange(len(layers[0]))] * ranks, rows
    return [
        np.array(table, np.int32)
        for stack, table in zip(model.stacks, tables, strict=True)
        for _ in jax.tree.leaves(stack)
    ]


def in_place(layer: Sequence[Block]) -> tuple[Block, ...]:
    """Return `Stages.in_place` for a row of the stacks: only the branch of dense layers reads the MLP."""
    return tuple(jax.tree.map(lambda _, i=i: i == 1, block) for i, block in enumerate(layer))


def run(
    blocks: tuple[Block, ...],
    x_BRD: jax.Array,
    inputs: LayerInputs,
    is_dense: jax.Array,
    rows: Rows,
) -> tuple[jax.Array, Routed | None, list[jax.Array], Terms]:
    """Run a layer of either kind as `Block` does, and return the sums of `rows.either` too.

    The first of `blocks` has attention and experts; the second has the sums of the gradients of the MLPs in the place
    of one (`Stages.in_place`).
    """
    block, mlp_sums = blocks
    leaves, tree = jax.tree.flatten(mlp_sums)
    leaves = rows.trained(leaves)
    block = block.gather_params(inputs)
    x_BRD, _, experts, terms = block.attend(x_BRD, inputs)

    def mlp(leaves, inputs, x_BRD):
        with jax.named_scope("mlp"):
            module = jax.tree.unflatten(tree, leaves).gather_params(inputs).mlp
            y_BRD = module(x_BRD)
            fix = "returns terms, which no pipeline of layers with and without experts takes; use a mesh without pp"
            require(not isinstance(y_BRD, tuple), "layers.mlp", type(module).__name__, fix)
            return y_BRD

    def run_shared(shared: MLP | None, x_BRD):
        return jnp.zeros_like(x_BRD) if shared is None else shared(x_BRD)

    def dense_or_shared(shared: MLP | None, x_BRD):
        return either(mlp, run_shared, is_dense, rows, inputs, leaves, shared, x_BRD)

    # Stages part ways here: each collective inside is over ranks of one stage, and none is a ppermute.
    x_BRD, routed, dense_extra, _ = block.feed(
        x_BRD, experts, inputs.moe, (is_dense, dense_or_shared)
    )
    return x_BRD, routed, dense_extra, terms


def _here(dense_order: LayerOrder, order: LayerOrder) -> jax.Array:
    """Return the position of each dense layer of this rank; of padding one beyond the end."""
    ranks = mesh_size("pp")
    size = len(order) // ranks
    places = [size if layer is None else order.index(layer) % size for layer in dense_order]
    return jnp.asarray(_by_rank(places, ranks), jnp.int32)[jax.lax.axis_index("pp")]


def _by_rank[T](items: Sequence[T], ranks: int) -> list[Sequence[T]]:
    size = len(items) // ranks
    return [items[start : start + size] for start in range(0, len(items), size)]


def _without(block: Block, *names: str) -> Block:
    block = copy.copy(block)
    for name in names:
        delattr(block, name)
    return block
