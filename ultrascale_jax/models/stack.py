"""Run a stack of equal layers: one scan over its rows, or one for each piece with a window and a precision."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ultrascale_jax.models.block import Block
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.layers import map_params
from ultrascale_jax.models.moe import Routed
from ultrascale_jax.parallel.prefetch import prefetch_scan
from ultrascale_jax.sharding.primitives import leave_sums


class Piece(NamedTuple):
    """Consecutive layers of a stack with the same window and precision."""

    block: Block
    """Their parameters, with a leading dim of layers."""
    rows: tuple
    """Their parts of `LayerInputs.stacked`."""
    inputs: LayerInputs
    """The inputs of all of them."""


class LayerOutputs(NamedTuple):
    """Results of layers besides the residual stream, with a leading dim of layers."""

    kv: tuple[jax.Array, jax.Array] | None
    """With a cache, keys and values."""
    routed: Routed | None
    """Choices and losses of the routers of experts, if there are any."""


def cut[Tree](stack: Tree, start: int, stop: int) -> Tree:
    """Return rows `start` up to `stop` of a stack; the whole as it is."""
    return jax.tree.map(lambda p: p if p.shape[0] == stop - start else p[start:stop], stack)


def run(
    stack: Block,
    layers: range,
    x_BRD: jax.Array,
    inputs: LayerInputs,
    remat: Callable,
    offload: Sequence[str],
) -> tuple[jax.Array, list[LayerOutputs]]:
    """Run a stack of these layers of the model: the residual stream, and the other results of each piece.

    `remat` and `offload` as in `Transformer.__call__`.
    """
    outputs = []
    for piece in _pieces(stack, layers, inputs):
        with jax.named_scope("layers"):
            x_BRD, output = _run(piece, x_BRD, remat, offload)
        outputs.append(output)
    return x_BRD, outputs


def _pieces(stack: Block, layers: range, inputs: LayerInputs) -> Iterator[Piece]:
    """Cut a stack where window or precision change."""
    cfg, fp8 = stack.cfg, inputs.fp8

    def traits(layer: int) -> tuple[int | None, bool]:
        in_fp8 = fp8 is not None and fp8.recipe.covers(layer, cfg.num_layers)
        return cfg.loop_window(layer), in_fp8

    for (window, in_fp8), group in itertools.groupby(layers, traits):
        first, *others = group
        stop = first + 1 + len(others)
        alike = dataclasses.replace(inputs, window=window, fp8=fp8 if in_fp8 else None)
        block = cut(stack, first - layers.start, stop - layers.start)
        yield Piece(block, cut(alike.stacked, first, stop), alike)


def _run(
    piece: Piece, x_BRD: jax.Array, remat: Callable, offload: Sequence[str]
) -> tuple[jax.Array, LayerOutputs]:
    """Run the layers of a piece."""
    num_layers = len(jax.tree.leaves(piece.block)[0])
    if piece.inputs.lowering.gathers_ahead and num_layers > 1:
        return _gathering_ahead(piece, x_BRD, remat, offload)

    def layer(x_BRD, row):
        block, layer_row = row
        inputs = piece.inputs.of_layer(layer_row)
        x_BRD, routed, cache = block.gather_params(inputs)(x_BRD, inputs)
        return x_BRD, LayerOutputs(cache and cache[:2], routed)

    return jax.lax.scan(remat(layer), x_BRD, (piece.block, piece.rows))


def _gathering_ahead(
    piece: Piece, x_BRD: jax.Array, remat: Callable, offload: Sequence[str]
) -> tuple[jax.Array, LayerOutputs]:
    """Run the layers, the parameters of the next one gathered while this one computes."""
    inputs, lowering = piece.inputs, piece.inputs.lowering

    def compute(block, x_BRD, inputs, row):
        x_BRD, routed, _ = block(x_BRD, inputs.of_layer(row))
        if routed is None:
            return x_BRD, jnp.float32(0.0)
        return x_BRD, routed.balance_BR, routed.statistics_Z

    def gather(block, row):
        return block.gather_params(inputs.of_layer(row))

    # The layers read no fp8 from their inputs: `gather_params` has made of it what their parameters are.
    context = dataclasses.replace(inputs, fp8=None)
    x_BRD, (balance_LBR, *statistics) = prefetch_scan(
        remat(compute),
        piece.block,
        x_BRD,
        gather=gather,
        constants=piece.rows,
        context=context,
        leave_sums=functools.partial(map_params, leave_sums) if lowering.sums_late else None,
        lowering=lowering,
        offload=offload,
    )
    return x_BRD, LayerOutputs(None, Routed(balance_LBR, *statistics) if statistics else None)
