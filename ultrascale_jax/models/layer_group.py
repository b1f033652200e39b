"""A row of a stack where layers of several kinds alternate: a group of consecutive layers, each a `Block` of its kind.

    Gemma 4:     stacks.0.layers.0 to .4 (a window), .5 (full attention of another shape), each [10, ...] for 60 layers
    Qwen3-Next:  stacks.0.layers.0, .1, .2 (linear attention), .3 (full attention), each [12, ...] for 48 layers
    Nemotron-H:  stacks.0.layers.0 to .5, each [4, ...], and stacks.1, [4, ...], for 28 layers (`model.pattern`)

All rows of the stack are equal, so one scan runs them, ZeRO-3 gathers a row ahead, and stages of a pipeline hold whole
rows. A row is one layer to all of these, but recomputation is of one layer at a time: a row keeps the input of each.
"""

import copy
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ultrascale_jax.config import KernelsConfig, ModelConfig
from ultrascale_jax.kernels.xla import gradients_together
from ultrascale_jax.models.block import Block, Layers, Terms
from ultrascale_jax.models.inputs import Cache, LayerInputs
from ultrascale_jax.models.moe import Routed

GROUP_INPUT = "group_input"
"""The name for `jax.checkpoint` of the inputs of the layers of a row, but for the first, which is the row's."""

type Row = Block | LayerGroup
"""A row of a stack, or a whole one, each of whose parameters has a leading L."""


class LayerGroup(nnx.Module):
    """Consecutive layers of the model, as one row of a stack; it is called as `Block` is."""

    def __init__(
        self, layers: Layers, cfg: ModelConfig, row: range, kernels: KernelsConfig, key: jax.Array
    ):
        self.cfg = cfg
        keys = zip(row, jax.random.split(key, len(row)), strict=True)
        self.layers = nnx.List([Block(layers, cfg, i, kernels, k) for i, k in keys])

    def gather_params(self, inputs: LayerInputs) -> "LayerGroup":
        """Return these layers with full parameters."""
        group = copy.copy(self)
        group.layers = nnx.List([layer.gather_params(inputs) for layer in self.layers])
        return group

    def __call__(
        self, x_BRD: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Routed | None, Cache | None, Terms]:
        """Map `[B, R, D]` to `[B, R, D]`; the other results of `Block` come stacked, of the layers that have them, the
        cache as one of each layer."""
        results: list[Any] = []
        run = (
            jax.checkpoint(_run, policy=jax.checkpoint_policies.nothing_saveable)
            if inputs.recompute_each
            else _run
        )
        for i, (layer, inputs_of_layer) in enumerate(with_inputs(self, inputs)):
            x_BRD = checkpoint_name(x_BRD, GROUP_INPUT) if i else x_BRD
            # Without it XLA computes the weight gradients of all layers of a row at its end, and keeps what they need.
            layer, x_BRD = gradients_together((layer, x_BRD))
            x_BRD, *result = run(layer, x_BRD, inputs_of_layer)
            results.append(result)
        routers, caches, parts = zip(*results, strict=True)
        routers = [routed for routed in routers if routed is not None]
        routed = jax.tree.map(_stacked, *routers) if routers else None
        names = dict.fromkeys(name for terms in parts for name in terms)
        terms = {name: _stacked(*(one[name] for one in parts if name in one)) for name in names}
        if inputs.cache is None:
            return x_BRD, routed, None, terms
        return x_BRD, routed, (*(cache[:-1] for cache in caches), caches[0][-1]), terms


def _stacked(*arrays: jax.Array) -> jax.Array:
    """Stack arrays; of partial sums `jnp.stack` returns the sum times the number of devices (JAX 0.12)."""
    return jnp.concatenate([array[None] for array in arrays])


def _run(layer: Block, x_BRD: jax.Array, inputs: LayerInputs) -> tuple:
    return layer(x_BRD, inputs)


def layers_of(row: Row) -> list[Block]:
    """Return the layers of a row."""
    return list(row.layers) if isinstance(row, LayerGroup) else [row]


def with_inputs(row: Row, inputs: LayerInputs) -> list[tuple[Block, LayerInputs]]:
    """Return the layers of a row, each with its part of the row's inputs."""
    if not isinstance(row, LayerGroup):
        return [(row, inputs)]
    return [(layer, inputs.of_group(row.cfg, i)) for i, layer in enumerate(row.layers)]


def by_layer(statistics_Z: jax.Array) -> jax.Array:
    """Return the rows' statistics, `[L, Z]` or of groups `[rows, layers, Z]`, by layer: `[L, Z]`."""
    return statistics_Z.reshape(-1, statistics_Z.shape[-1])


def make_row(
    layers: Layers, cfg: ModelConfig, row: range, kernels: KernelsConfig, key: jax.Array
) -> Row:
    """Make the row of a stack that has these layers of the model."""
    if len(row) == 1:
        return Block(layers, cfg, row.start, kernels, key)
    return LayerGroup(layers, cfg, row, kernels, key)
