"""Round stochastically to bfloat16, right on average, for sums to which each step adds little.

The nearest bfloat16 of a number is up to 1/512 away, so a running average that moves by less than that does not change.
If it is rounded up with the probability of the lost fraction, it moves by the right amount on average.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import Config
from ultrascale_jax.models.layers import map_params
from ultrascale_jax.models.transformer import Transformer, map_with_order
from ultrascale_jax.parallel.pipeline.schedules import LayerOrder
from ultrascale_jax.sharding.rules import is_matrix


def round_stochastically(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Round float32 `x` to bfloat16, towards zero or away from it, by 16 random bits (the lower half of a uint32)."""
    raw = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits & 0xFFFF)
    return jax.lax.bitcast_convert_type((raw >> 16).astype(jnp.uint16), jnp.bfloat16)


def in_bfloat16(adam: Any, seed: int, row: jax.Array | None = None) -> optax.GradientTransformation:
    """Return `adam` (`optax.scale_by_adam` in float32) with both moments in bfloat16, rounded stochastically.

    The random numbers depend on the seed, the step, the parameter and its layer alone: the same on every mesh, and
    after a resume. Each device computes the numbers of its shards.
    """

    def init(params):
        return _cast(adam.init(params), jnp.bfloat16)

    def update(grads, state, params):
        updates, new = adam.update(grads, _cast(state, jnp.float32), params)
        bits = random_bits(jax.random.fold_in(jax.random.key(seed), new.count), params, row)
        mu = jax.tree.map(round_stochastically, new.mu, bits)
        nu = jax.tree.map(lambda x, b: round_stochastically(x, b >> 16), new.nu, bits)
        return updates, new._replace(mu=mu, nu=nu)

    return optax.GradientTransformation(init, update)  # pyrefly: ignore


def in_storage_type(cfg: Config, params: Transformer) -> Transformer:
    """Return parameters in the types in which they are stored: matrices of the layers in `optim.weight_dtype`."""

    def leaf(value, dims, act_dims):
        is_stored_so = dims.startswith("L") and is_matrix(dims) and not {"X", "U"} & set(dims)
        return value.astype(cfg.optim.weight_dtype) if is_stored_so else value

    return map_params(leaf, params)


def add_updates(
    params: Transformer,
    updates: Transformer,
    seed: int,
    step: jax.Array,
    row: jax.Array | None = None,
) -> Transformer:
    """Return the parameters after an optimizer's float32 updates; bfloat16 ones are rounded stochastically.

    The random numbers are not the moments', and depend on as little; `row` as in `random_bits`.
    """
    bits = random_bits(jax.random.fold_in(jax.random.key(seed), -1 - step), params, row)

    def leaf(p, u, b):
        new = p.astype(jnp.float32) + u.astype(jnp.float32)
        return round_stochastically(new, b) if p.dtype == jnp.bfloat16 else new.astype(p.dtype)

    return jax.tree.map(leaf, params, updates, bits)


def random_bits(key: jax.Array, params: Transformer, row: jax.Array | None = None) -> Transformer:
    """Return 32 random bits for each element of the parameters, in their shardings, whatever a layer's row.

    The stacks have all rows, or `row` alone, of the rows of each rank of a pipeline.
    """
    numbers = itertools.count()

    def leaf(order: LayerOrder | None, x: jax.Array) -> jax.Array:
        leaf_key, spec = jax.random.fold_in(key, next(numbers)), jax.typeof(x).sharding.spec
        if order is None:
            return jax.random.bits(leaf_key, x.shape, jnp.uint32, out_sharding=spec)
        layers = np.array([layer or 0 for layer in order])  # padding is zero, and zero stays zero
        if row is not None:
            layers = jnp.asarray(layers.reshape(len(x), -1))[:, row]
        keys = jax.vmap(lambda layer: jax.random.fold_in(leaf_key, layer))(layers)
        keys = jax.reshard(keys, P(*spec.partitions[:1]))
        of_row = P(*spec.partitions[1:])
        return jax.vmap(
            lambda key: jax.random.bits(key, x.shape[1:], jnp.uint32, out_sharding=of_row)
        )(keys)

    return map_with_order(leaf, params)


def _cast(state: Any, dtype: jax.typing.DTypeLike) -> Any:
    def leaf(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(leaf, state)
