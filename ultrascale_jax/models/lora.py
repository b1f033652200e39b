"""Low-rank adapters of a model's weights (LoRA, arXiv 2106.09685): made, split from their base, merged into it.

`models/linear.py` multiplies with them. They are parameters of the module that has the weight, as `attn.lora.w_q.a`,
and every pass over all parameters (sharding, ZeRO, checkpoints) includes them.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ultrascale_jax.config import require
from ultrascale_jax.config.lora import Lora
from ultrascale_jax.models.attention import Attention
from ultrascale_jax.models.block import Block
from ultrascale_jax.models.fp8 import is_variable
from ultrascale_jax.models.layer_group import Row, layers_of
from ultrascale_jax.models.layers import MLP
from ultrascale_jax.models.linear_attention import LinearAttention
from ultrascale_jax.models.mamba import Mamba2
from ultrascale_jax.models.mixers import SideBySide
from ultrascale_jax.models.mla import MLA
from ultrascale_jax.models.moe import MoE, SharedExperts
from ultrascale_jax.models.transformer import stacked
from ultrascale_jax.sharding.rules import EXPERTS, out_sharding, specs, stored_spec

PLACES: dict[str, tuple[str, ...]] = {
    "q_proj": ("attn.w_q", "attn.w_gate"),
    **{f"{name}_proj": (f"attn.w_{name}",) for name in ("k", "v", "o", "q_a", "q_b", "kv_b")},
    "kv_a_proj_with_mqa": ("attn.w_kv_a",),
    **{
        f"{name}_proj": (f"mlp.w_{name}", f"moe.shared.w_{name}") for name in ("gate", "up", "down")
    },
    "in_proj_qkvz": tuple(f"linear.w_{name}" for name in "qkvz"),
    "in_proj_ba": ("linear.w_b", "linear.w_a"),
    "in_proj": tuple(f"mamba.w_{name}" for name in "zvkqa"),
    "out_proj": ("linear.w_o", "mamba.w_o"),
    **{f"experts.{name}_proj": (f"moe.w_{name}",) for name in ("gate", "up", "down")},
}
"""Paths in a block of the weights of each target; `attn`, `linear` and `mamba` are its mixers of these kinds."""

LINEAR = {LinearAttention: "linear", Mamba2: "mamba"}
"""Its name there by class."""


class Adapter(nnx.Module):
    """A and B of one weight; B begins with zeros, so that nothing changes at first."""

    def __init__(self, weight: nnx.Param, lora: Lora, key: jax.Array):
        """`weight` is the base, of one layer or stacked, and `key` that of A, whose init is PEFT's own."""
        dims = weight.dims
        sizes = dict(zip(dims, weight.get_value().shape[-len(dims) :], strict=True))
        sizes["U"] = lora.rank
        rows, columns = sides(dims)
        self.scale = lora.scale
        bound = 1 / math.sqrt(math.prod(sizes[dim] for dim in rows.strip(f"{EXPERTS}U")))

        def draw(dims: str, value: Callable) -> jax.Array:
            shape = tuple(sizes[dim] for dim in dims)
            return value(shape, out_sharding=out_sharding(stored_spec(dims, shape)))

        uniform = functools.partial(
            jax.random.uniform, key, dtype=jnp.float32, minval=-bound, maxval=bound
        )
        # The gradient of A is a sum also over the devices that split the base's columns, and B's over the devices that
        # split its rows: each multiplies a shard of its own with the replicated side.
        a, b = draw(rows, uniform), draw(columns, jnp.zeros)
        act = weight.act_dims
        self.a = nnx.Param(a, dims=rows, act_dims=act + columns, multiplier=weight.multiplier)
        self.b = nnx.Param(b, dims=columns, act_dims=act + "U", multiplier=1.0)


def sides(dims: str) -> tuple[str, str]:
    """Return the dims of A and B of a weight with these dims: `DU` and `UNH` of `DNH`; experts come first in both."""
    matrix = dims.lstrip(EXPERTS)
    each = dims.removesuffix(matrix)
    split = len(matrix) - 1 if matrix.endswith("D") else 1
    return f"{each}{matrix[:split]}U", f"{each}U{matrix[split:]}"


class Adapters(nnx.Module):
    """The adapters of a module, by the names of its weights."""


class Place(NamedTuple):
    """A weight that has an adapter, or gets one."""

    target: str
    path: str
    """Path of the weight in the model, as `stacks.0.attn.w_q`."""
    module: Any
    """The module that has it."""
    name: str
    """Its name there."""

    @property
    def weight(self) -> nnx.Param:
        """The base."""
        return getattr(self.module, self.name)

    @property
    def adapter(self) -> Adapter | None:
        """Its adapter, if it has one."""
        return getattr(getattr(self.module, "lora", None), self.name, None)


def places(model: Any, targets: Iterable[str] = tuple(PLACES)) -> Iterator[Place]:
    """Yield the weights of these targets in the layers of a model, `model.mtp_layers` included."""
    blocks = {f"stacks.{i}": stack for i, stack in enumerate(model.stacks)}
    blocks |= {f"mtp.{i}.block": module.block for i, module in enumerate(getattr(model, "mtp", ()))}
    for path, row in blocks.items():
        yield from row_places(row, path, targets)


def row_places(row: Row, path: str, targets: Iterable[str]) -> Iterator[Place]:
    """Yield the weights of these targets in a row of a stack that has this path in the model."""
    for depth, block in enumerate(layers_of(row)):
        inner = path if block is row else f"{path}.layers.{depth}"
        for target in targets:
            yield from _block_places(block, inner, target)


def _block_places(block: Block, path: str, target: str) -> Iterator[Place]:
    attn = getattr(block, "attn", None)
    mixers: dict[str, Any] = {"attn": attn}
    if isinstance(attn, SideBySide):
        mixers = {"attn.attention": attn.attention, "attn.linear": attn.linear}
    paths = {LINEAR.get(type(mixer), "attn"): path for path, mixer in mixers.items()}
    for place in PLACES[target]:
        outer, _, name = place.rpartition(".")
        if outer in ("attn", *LINEAR.values()):
            if outer not in paths:
                continue
            outer = paths[outer]
        module = block
        for part in outer.split("."):
            module = getattr(module, part, None)
        if hasattr(module, name):
            yield Place(target, f"{path}.{outer}.{name}", module, name)


def add_adapters[M](model: M, lora: Lora, key: jax.Array) -> M:
    """Give the targets in the layers of `model` adapters; return it."""
    typed: Any = model
    targets = lora.targets_of(typed.cfg)
    k_stacks, k_modules = jax.random.split(key)

    def make(row: Row, key: jax.Array) -> dict[str, Adapter]:
        adapted = list(row_places(row, "", targets))
        keys = jax.random.split(key, len(adapted))
        return {p.path: Adapter(p.weight, lora, k) for p, k in zip(adapted, keys, strict=True)}

    def add(row: Row, adapters: dict[str, Adapter]) -> None:
        for place in row_places(row, "", targets):
            module = place.module
            fix = f"adapters are for built-in layers, and the model has a {type(module).__name__}; train all parameters"
            built_in = type(module) in (Attention, MLA, *LINEAR, MLP, MoE, SharedExperts)
            require(built_in, "train.lora.targets", place.target, fix)
            if not hasattr(module, "lora"):
                module.lora = Adapters()
            setattr(module.lora, place.name, adapters[place.path])

    for stack, order in zip(typed.stacks, typed.orders, strict=True):
        add(stack, stacked(functools.partial(make, stack), typed.cfg, k_stacks, order))
    for i, module in enumerate(getattr(typed, "mtp", ())):
        add(module.block, make(module.block, jax.random.fold_in(k_modules, i)))
    return model


@jax.jit
def merged[M](adapters: M, base: M) -> M:
    """Return `base`, a model whose adapters are elsewhere, with W + scale * A B in place of each adapted weight W."""
    model = without_adapters(base)
    by_path = {place.path: place.adapter for place in places(adapters)}
    for place in places(model):
        if (adapter := by_path[place.path]) is not None:
            weight = place.weight
            value = _merged(weight.get_value(), adapter)
            setattr(place.module, place.name, weight.replace(value))
    return model


def without_adapters[M](base: M) -> M:
    """Return a copy of `base`, the second part of `split_adapters`, without the places of the adapters' arrays."""
    model = jax.tree.map(lambda variable: variable, base, is_leaf=is_variable)
    for place in places(model):
        if hasattr(place.module, "lora"):
            del place.module.lora
    return model


def _merged(weight: jax.Array, adapter: Adapter) -> jax.Array:
    a, b = adapter.a, adapter.b
    dims = a.dims[:-1] + b.dims.lstrip(EXPERTS)[1:]
    layers = "L" * (weight.ndim - len(dims))
    subscripts = f"{layers}{a.dims},{layers}{b.dims}->{layers}{dims}"

    def add(weight, a, b):
        product = jnp.einsum(subscripts, a, b, precision="highest")
        return (weight + adapter.scale * product).astype(weight.dtype)

    arrays = weight, a.get_value(), b.get_value()
    run: Callable = jax.sharding.auto_axes(add, out_sharding=specs(weight))
    return run(*arrays)
