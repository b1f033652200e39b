"""Run a stack of equal layers: one scan over its rows, or one for each segment of equal ones."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ultrascale_jax.models.block import Terms
from ultrascale_jax.models.inputs import LayerInputs
from ultrascale_jax.models.layer_group import Row
from ultrascale_jax.models.layers import map_params
from ultrascale_jax.models.moe import Routed
from ultrascale_jax.models.partition import combine, split_adapters
from ultrascale_jax.parallel.prefetch import prefetch_scan
from ultrascale_jax.sharding.primitives import leave_sums


class Recomputation(NamedTuple):
    """The way in which a layer is run for its backward pass; by default it keeps everything."""

    wrap: Callable[[Callable], Callable] = lambda layer: layer
    """Wraps the layer's function, to say what its backward pass recomputes."""
    offload: tuple[str, ...] = ()
    """Names of kept tensors that wait in the host's memory, where `lowering` gathers ahead; not with a cache."""
    adapt: Callable[[LayerInputs], LayerInputs] = lambda inputs: inputs
    """Sets the fields of the layer's inputs that follow from it."""


KEEP_ALL = Recomputation()


def keep_all(layer: int) -> Recomputation:
    """Return the recomputation of a layer, by its number, that keeps everything."""
    return KEEP_ALL


class Segment(NamedTuple):
    """Consecutive layers of a stack with the same window, precision and recomputation."""

    block: Row
    """Their parameters, with a leading dim of layers."""
    rows: tuple
    """Their parts of `LayerInputs.stacked`."""
    inputs: LayerInputs
    """The inputs of all of them."""
    recomputation: Recomputation
    """The way in which they are run for their backward pass."""
    waits: bool
    """Whether layers with another policy follow, in whose backward pass nothing of these is to be gathered."""
    last_layer: int
    """Number of the last one in the model."""


class LayerOutputs(NamedTuple):
    """Results of layers besides the residual stream, with a leading dim of layers."""

    kv: tuple | None
    """With a cache, its parts but for the number of tokens: keys and values, say."""
    routed: Routed | None
    """Choices and losses of the routers of experts, if there are any."""
    terms: Terms
    """Terms that the parts of the layers returned."""


def cut[Tree](stack: Tree, rows: range) -> Tree:
    """Return these rows of a stack; the whole as it is."""
    taken = slice(rows.start, rows.stop, rows.step)
    return jax.tree.map(lambda p: p if p.shape[0] == len(rows) else p[taken], stack)


def segments(
    stack: Row,
    layers: range,
    inputs: LayerInputs,
    remat: Callable[[int], Recomputation] = keep_all,
    ends: Collection[int] = (),
) -> Iterator[Segment]:
    """Cut a stack of these layers of the model where window, precision or recomputation change, and after the layers in
    `ends`; a cache among the inputs is that of the stack."""
    cfg, fp8 = stack.cfg, inputs.fp8

    def traits(layer: int) -> tuple[int | None, bool, Recomputation, int]:
        in_fp8 = fp8 is not None and fp8.recipe.covers(layer, cfg.num_layers)
        return cfg.loop_window(layer), in_fp8, remat(layer), sum(last < layer for last in ends)

    for (window, in_fp8, recomputation, _), group in itertools.groupby(layers, traits):
        numbers = list(group)
        first, stop = numbers[0], numbers[-1] + layers.step
        inputs_of_segment = dataclasses.replace(
            recomputation.adapt(inputs), window=window, fp8=fp8 if in_fp8 else None
        )
        places = range(*((layer - layers.start) // layers.step for layer in (first, stop)))
        block, (kv, *by_layer) = cut(stack, places), inputs_of_segment.stacked
        rows = cut(kv, places), *cut(by_layer, range(first, stop, layers.step))
        waits = remat(cfg.num_layers - 1) != recomputation
        yield Segment(block, rows, inputs_of_segment, recomputation, waits, stop - 1)


def run(segment: Segment, x_BRD: jax.Array) -> tuple[jax.Array, LayerOutputs]:
    """Run the layers of a segment."""
    num_layers = len(jax.tree.leaves(segment.block)[0])
    if segment.inputs.lowering.gathers_ahead and num_layers > 1:
        return _gathering_ahead(segment, x_BRD)

    def layer(x_BRD, row):
        block, layer_row = row
        inputs = segment.inputs.of_layer(layer_row)
        x_BRD, routed, cache, terms = block.gather_params(inputs)(x_BRD, inputs)
        return x_BRD, LayerOutputs(cache and cache[:-1], routed, terms)

    return jax.lax.scan(segment.recomputation.wrap(layer), x_BRD, (segment.block, segment.rows))


def _gathering_ahead(segment: Segment, x_BRD: jax.Array) -> tuple[jax.Array, LayerOutputs]:
    """Run the layers, the parameters of the next one gathered while this one computes."""
    inputs, lowering = segment.inputs, segment.inputs.lowering

    def compute(block, x_BRD, inputs, constants):
        row, _ = constants
        x_BRD, routed, _, terms = block(x_BRD, inputs.of_layer(row))
        if routed is None:
            return x_BRD, (jnp.float32(0.0), terms)
        return x_BRD, (routed.balance_BR, terms), routed.statistics_Z

    def gather(trained, constants):
        row, frozen = constants
        block = trained if frozen is None else combine(trained, frozen)
        return block.gather_params(inputs.of_layer(row))

    # The base of adapters is frozen.
    trained, frozen = split_adapters(segment.block)
    if not jax.tree.leaves(trained):
        trained, frozen = frozen, None

    # The layers read no fp8 from their inputs: `gather_params` has made of it what their parameters are.
    context = dataclasses.replace(inputs, fp8=None)
    x_BRD, ((balance_LBR, terms), *statistics) = prefetch_scan(
        segment.recomputation.wrap(compute),
        trained,
        x_BRD,
        gather=gather,
        constants=(segment.rows, frozen),
        context=context,
        leave_sums=functools.partial(map_params, leave_sums) if lowering.sums_late else None,
        lowering=lowering,
        offload=segment.recomputation.offload,
        waits=segment.waits,
    )
    routed = Routed(balance_LBR, *statistics) if statistics else None
    return x_BRD, LayerOutputs(None, routed, terms)
