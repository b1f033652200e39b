"""ZeRO: shard the state over (fsdp, cp, ep), gather parameters for use, and reduce gradients once a step.

    zero   stored       gathered            gradients
    0      replicated   -                   accumulate locally; one all-reduce a step
    1      sharded      once a step         accumulate locally; one reduce-scatter a step
    2      sharded      once a step         reduce-scatter each micro-batch, accumulate the shard
    3      sharded      layer by layer      reduce-scatter each layer and micro-batch, accumulate the shard

`Block.gather_params` gathers layer by layer; its transpose is the reduce-scatter of stage 3.
Over dp every stage accumulates locally and all-reduces once a step (with 1 to 3: only its shard). With stage 3 each
layer's backward pass does it instead where that is faster (`summed_by_layer`).
"""

from collections.abc import Set

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import Config
from ultrascale_jax.config.lowering import Lowering
from ultrascale_jax.models.layers import map_params, zero_sizes
from ultrascale_jax.models.transformer import Transformer
from ultrascale_jax.sharding.primitives import (
    gather_param,
    keep_sharded,
    reduce_gradient,
    scatter_gradient,
)
from ultrascale_jax.sharding.rules import (
    SHARD,
    gathered_spec,
    gradient_axes,
    is_matrix,
    stored_spec,
)
from ultrascale_jax.train_step.precision import COMPUTE


def prepare_params(cfg: Config, params: Transformer) -> Transformer:
    """Return the parameters for the micro-batches: with `zero < 3`, cast and gather them here, once a step.

    Their cotangents stay unreduced over the axes that shard the batch and the sequence (under ZeRO-3, except
    the axes that shard the parameters), so that gradients accumulate without communication.
    """

    dtype, sizes = COMPUTE[cfg.train.precision], zero_sizes(cfg.model, params)

    def leaf(value, dims, act_dims):
        if is_gathered_by_layer(cfg, dims):
            return keep_sharded(value, dims, act_dims, dtype, summed=summed_by_layer(cfg, dims))
        return gather_param(value, dims, act_dims, dtype, sizes)

    return map_params(leaf, params)


def is_gathered_by_layer(cfg: Config, dims: str) -> bool:
    """Return whether each layer gathers this parameter for itself (ZeRO-3)."""
    return cfg.train.zero == 3 and is_matrix(dims)


def summed_by_layer(cfg: Config, dims: str) -> Set[str]:
    """Return the axes over which each layer's backward pass sums this parameter's gradient: dp, or none."""
    by_layer = Lowering.of(cfg).sums_by_layer and is_gathered_by_layer(cfg, dims)
    return frozenset({"dp"} if by_layer else ())


def accumulator_spec(cfg: Config, value: jax.Array, dims: str, act_dims: str) -> P:
    """Return the sharding of a gradient accumulator."""
    axes = gradient_axes(dims, act_dims)
    if cfg.train.zero >= 2 and is_matrix(dims):
        axes -= set(SHARD) | summed_by_layer(cfg, dims)
        return P(*stored_spec(dims, value.shape).partitions, unreduced=axes)
    return P(*gathered_spec(dims, value.shape).partitions, unreduced=axes)


@jax.named_scope("gradients")
def to_accumulator(cfg: Config, grads: Transformer, params: Transformer) -> Transformer:
    """Convert one micro-batch's gradients to float32 and the accumulator's sharding (zero 2: the reduce-scatter)."""

    def leaf(g, dims, act_dims, value):
        g = scatter_gradient(g, dims, act_dims, value) if cfg.train.zero == 2 else g
        return g.astype(jnp.float32)

    return map_params(leaf, grads, params)


@jax.named_scope("gradients")
def reduce_gradients(grads: Transformer, params: Transformer) -> Transformer:
    """Reduce gradients, once a step, to the sharding of parameters and moments."""
    return map_params(reduce_gradient, grads, params)
