"""Matrices below adapters that are stored in fp8: quantised once, and not in every step, to the same values.

A matrix of a stack is stored as e4m3, with the largest magnitudes of its layers, which give their scales:
`attn.w_q` `[L, D, N, H]` and `attn.amaxes.w_q` `[L]`. ZeRO gathers it as it is, 1 byte a parameter.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from ultrascale_jax.kernels.quantize_fp8 import quantize_fp8
from ultrascale_jax.models.fp8 import AMAXES, in_fp8, is_variable
from ultrascale_jax.sharding.rules import is_of_experts


class Amaxes(nnx.Module):
    """The largest magnitudes of a module's matrices in each layer, by the matrices' names."""


class Resting(NamedTuple):
    """A stacked matrix as it is stored, in place of its parameter's value."""

    values: jax.Array
    """`[L, ...]`, e4m3."""
    amaxes: jax.Array
    """`[L]`, float32."""


def quantised[M](model: M) -> M:
    """Return a `Transformer` whose stacks' matrices are stored in fp8; they are in the type of compute."""
    return with_amaxes(jax.tree.map(rest, model, is_leaf=is_variable))


def rest(param: Any) -> Any:
    """Return a frozen parameter, with `Resting` in place of its value if it is stored in fp8: a matrix of a stack.

    Experts' products quantise what was gathered: they stay as they are.
    """
    value, dims = param.get_value(), param.dims
    stays = value is None or not in_fp8(dims) or is_of_experts(dims)
    return param if stays or value.ndim == len(dims) else param.replace(_quantise(value))


@jax.jit
def _quantise(value: jax.Array) -> Resting:
    """Quantise each layer of a stacked matrix with one scale."""

    def layer(row: jax.Array) -> Resting:
        amax = jnp.max(jnp.abs(row)).astype(jnp.float32)
        return Resting(quantize_fp8(row, "tensor", amax=amax).values, amax)

    spec = jax.typeof(value).sharding.spec
    specs: Any = P(*spec), P(spec[0])
    run: Callable = jax.sharding.auto_axes(jax.vmap(layer), out_sharding=Resting(*specs))
    return run(value)


def with_amaxes[M](model: M) -> M:
    """Return a model, some of whose values are `Resting`, with these values and amaxes in parameters of their own."""
    copied: Any = jax.tree.map(lambda param: param, model, is_leaf=is_variable)
    for _, module in nnx.iter_modules(copied):
        params = {name: p for name, p in vars(module).items() if isinstance(p, nnx.Param)}
        for name, param in params.items():
            value = param.get_value()
            if not isinstance(value, Resting):
                continue
            setattr(module, name, param.replace(value.values))
            if not hasattr(module, AMAXES):
                setattr(module, AMAXES, Amaxes())
            amaxes = nnx.Param(value.amaxes, dims="", act_dims="", multiplier=1.0)
            setattr(getattr(module, AMAXES), name, amaxes)
    return copied
