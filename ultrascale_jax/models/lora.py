"""Low-rank adapters beside the projections of attention and feed-forward layers (LoRA, arXiv 2106.09685).

    column-parallel (q, k, v, gate, up)   x_BRD -> A -> [B, R, U] -> gathered over sp -> B -> as the projection's result
    row-parallel (o, down)                x split over the tensor group -> A, summed to [B, R, U] -> B -> [B, R, D]

U is the rank, which no axis splits in an activation. A and B have the base's other dims, split as the base is, so only
activations as narrow as the rank are communicated over the tensor group.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ultrascale_jax.config import require
from ultrascale_jax.config.lora import Lora
from ultrascale_jax.models.attention import Attention
from ultrascale_jax.models.fp8 import is_variable, linear
from ultrascale_jax.models.layers import MLP, adapter_of, gather_sequence, has_adapters
from ultrascale_jax.models.partition import partition
from ultrascale_jax.sharding.rules import specs, stored_spec

WEIGHTS = {
    **{f"{name}_proj": ("attn", f"w_{name}") for name in ("q", "k", "v", "o")},
    **{f"{name}_proj": ("mlp", f"w_{name}") for name in ("gate", "up", "down")},
}
"""Part of the blocks and name of the weight of each target."""


class Adapter(nnx.Module):
    """A and B of one projection, of all layers; B begins with zeros, so that nothing changes at first."""

    def __init__(self, weight: nnx.Param, lora: Lora, key: jax.Array):
        """`weight` is the base, stacked over layers, and `key` that of A, whose init is PEFT's own."""
        dims, (layers, *sizes) = weight.dims, weight.get_value().shape
        split = 1 if dims.startswith("D") else len(dims) - 1
        rows, columns = dims[:split] + "U", "U" + dims[split:]
        self.scale = lora.scale
        bound = 1 / math.sqrt(math.prod(sizes[:split]))
        shape = (layers, *sizes[:split], lora.rank)
        spec = stored_spec("L" + rows, shape)
        a = jax.random.uniform(key, shape, jnp.float32, -bound, bound, out_sharding=spec)
        shape = (layers, lora.rank, *sizes[split:])
        b = jnp.zeros(shape, jnp.float32, out_sharding=stored_spec("L" + columns, shape))
        column_parallel = split == 1 and dims.startswith("D")
        self.a = nnx.Param(a, dims=rows, act_dims="BRD" if column_parallel else weight.act_dims)
        self.b = nnx.Param(b, dims=columns, act_dims="BTU" if column_parallel else "BRU")

    def latents(self, x_BRD: jax.Array) -> jax.Array:
        """Return scale * x A `[B, T, U]` of a column-parallel projection's input."""
        return gather_sequence(self.scale * linear("BRD,DU->BRU", x_BRD, self.a[...]))

    def rows(self, x: jax.Array, dims: str) -> jax.Array:
        """Return scale * x A B `[B, R, D]` of a row-parallel projection's input, which has these dims."""
        contracted = dims.removeprefix("BT")
        h_BRU = linear(f"{dims},{contracted}U->BTU", x, self.a[...], to="BRU")
        # Scaled last, the cotangent has a sharding that XLA's partitioner knows, and does not where a scan hands it in.
        return self.scale * linear("BRU,UD->BRD", h_BRU, self.b[...])


class Adapters(nnx.Module):
    """The adapters of a module, by the names of its weights."""


def add_adapters[M](model: M, lora: Lora, key: jax.Array) -> M:
    """Give the targets in the layers of `model` adapters; return it."""
    keys = jax.random.split(key, len(lora.targets))
    for target, target_key in zip(lora.targets, keys, strict=True):
        part, name = WEIGHTS[target]
        module = getattr(stack_of(model), part)
        fix = f"adapters are for built-in layers, and the model has a {type(module).__name__}; train all parameters"
        require(type(module) in (Attention, MLP), "train.lora.targets", target, fix)
        if not has_adapters(module):
            module.lora = Adapters()
        setattr(module.lora, name, Adapter(getattr(module, name), lora, target_key))
    return model


def stack_of(model: Any) -> Any:
    """Return the layers of a model that can have adapters: all, as none has experts."""
    [stack] = model.stacks
    return stack


def split_adapters[M](model: M) -> tuple[M, M]:
    """Return the model with its adapters alone, and without them, as `partition` does."""
    return partition(model, lambda path: ".lora." in path)


@jax.jit
def merged[M](adapters: M, base: M) -> M:
    """Return `base`, a model whose adapters are elsewhere, with W + scale * A B in place of each adapted weight W."""
    model = without_adapters(base)
    for part, name in WEIGHTS.values():
        if (adapter := adapter_of(getattr(stack_of(adapters), part), name)) is not None:
            module = getattr(stack_of(model), part)
            weight = getattr(module, name)
            setattr(module, name, weight.replace(_merged(weight.get_value(), weight.dims, adapter)))
    return model


def without_adapters[M](base: M) -> M:
    """Return a copy of `base`, the second part of `split_adapters`, without the places of the adapters' arrays."""
    model: Any = jax.tree.map(lambda variable: variable, base, is_leaf=is_variable)
    for part in ("attn", "mlp"):
        if has_adapters(module := getattr(stack_of(model), part)):
            del module.lora
    return model


def _merged(weight: jax.Array, dims: str, adapter: Adapter) -> jax.Array:
    a, b = adapter.a, adapter.b
    subscripts = f"L{a.dims},L{b.dims}->L{dims}"

    def add(weight, a, b):
        product = jnp.einsum(subscripts, a, b, precision="highest")
        return (weight + adapter.scale * product).astype(weight.dtype)

    arrays = weight, a.get_value(), b.get_value()
    run: Callable = jax.sharding.auto_axes(add, out_sharding=specs(weight))
    return run(*arrays)
