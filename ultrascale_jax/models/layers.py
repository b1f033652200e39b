"""Parameters that know their dims, and the two layers that every decoder shares: RMSNorm and the gated MLP."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import ModelConfig
from ultrascale_jax.config.base import Implementation
from ultrascale_jax.kernels.quantize_fp8 import quantize_fp8
from ultrascale_jax.kernels.rms_norm import rms_norm as rms_norm_of_pieces
from ultrascale_jax.models.fp8 import Fp8Weight, Recipe, as_bits, linear
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.rules import (
    SHARD,
    TENSOR,
    act,
    axes_of,
    gathered,
    is_matrix,
    manual,
    mean,
    mesh_size,
    offset,
    reshard,
    shard_axes,
    specs,
    stored,
    vary,
    varying,
    zero_dim,
)

INIT_STD = 0.02


def param(
    key: jax.Array | None, dims: str, on: str, shape: tuple[int, ...], *, std: float = INIT_STD
) -> nnx.Param:
    """A float32 parameter with these dims; `on` are the dims of the activation that it meets.

    Without a key it is made of ones when `std` is 1 (norm scales) and zeros when it is 0 (biases).
    """
    spec = stored(dims, shape)
    if key is None:
        value = jnp.full(shape, std, jnp.float32, out_sharding=spec)
    else:
        value = std * jax.random.normal(key, shape, jnp.float32, out_sharding=spec)
    return nnx.Param(value, dims=dims, on=on)


def map_params[M](fn: Callable[..., Any], module: M, *rest: M) -> M:
    """`module` with `fn(array, dims, on, *arrays of rest)` of each parameter; dims of a stacked one start with L."""

    def apply(variable, *others):
        value = variable.get_value()
        dims, on = variable.dims, variable.on
        stacked = "L" if value.ndim == len(dims) + 1 else ""
        return variable.replace(
            fn(value, stacked + dims, on, *(other.get_value() for other in others))
        )

    return jax.tree.map(apply, module, *rest, is_leaf=lambda x: isinstance(x, nnx.Variable))


def gradient_axes(dims: str, on: str) -> frozenset[str]:
    """The axes over which a parameter's gradient is a sum: those that split what it meets, and not itself."""
    return axes_of(on) - axes_of(dims)


def cast(value: jax.Array, dims: str, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A parameter in the type of compute; vectors (norm scales and biases) and the router stay float32."""
    return value.astype(dtype) if is_matrix(dims) and "X" not in dims else value


def is_gathered(value: jax.Array, dims: str, cfg: ModelConfig) -> bool:
    """Whether a piece of a parameter is whole over the axes of ZeRO."""
    latent = cfg.latent
    sizes = {"D": cfg.d_model}
    sizes |= {} if latent is None else {"Q": latent.q_rank, "J": latent.kv_rank}
    return not is_matrix(dims) or value.shape[zero_dim(dims)] == sizes[dims[zero_dim(dims)]]


def gather_param(
    value: jax.Array, dims: str, on: str, dtype: jax.typing.DTypeLike, cfg: ModelConfig
) -> jax.Array:
    """A parameter as it is used: cast, and whole over (fsdp, cp, ep), an all-gather where it rests sharded.

    Its cotangent stays unreduced over the axes that split what it meets. What is whole already stays as it is.
    """
    value = cast(value, dims, dtype)
    if not manual():
        spec = gathered(dims, value.shape, reduced=gradient_axes(dims, on))
        return jax.reshard(row_major(value), spec)
    value = vary(value, _varying_axes(dims, on))
    if is_gathered(value, dims, cfg):
        return value
    axes = shard_axes(dims)
    return jax.lax.all_gather(row_major(value), axes, axis=zero_dim(dims), tiled=True)


def gather_fp8(
    value: jax.Array,
    dims: str,
    on: str,
    dtype: jax.typing.DTypeLike,
    cfg: ModelConfig,
    recipe: Recipe,
    amax: jax.Array | None,
) -> Fp8Weight:
    """`gather_param` for products in fp8: with one scale for a tensor, made of `amax`, what travels is fp8."""
    whole = gather_param(value, dims, on, dtype, cfg)
    if amax is None:
        return Fp8Weight(whole, None, None, recipe)
    value = jax.lax.stop_gradient(value)
    if not manual():
        value = jax.reshard(value, P(*jax.typeof(value).sharding.spec.partitions))
    values, scale = quantize_fp8(value, "tensor", amax=amax, power_of_2=True)
    return Fp8Weight(whole, gather_param(as_bits(values), dims, on, jnp.uint8, cfg), scale, recipe)


def shard_param(value: jax.Array, dims: str, on: str, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A parameter that each layer gathers for itself (ZeRO-3): sharded as it rests.

    Its cotangent stays unreduced over the other axes that split what it meets. On pieces it is cast here and not in
    every layer.
    """
    if not manual():
        spec = stored(dims, value.shape, reduced=gradient_axes(dims, on) - set(SHARD))
        return jax.reshard(value, spec)
    return vary(cast(value, dims, dtype), _varying_axes(dims, on))


def scatter_gradient(grad: jax.Array, dims: str, value: jax.Array) -> jax.Array:
    """On pieces: a partial sum of a gradient added over (fsdp, cp, ep), each device keeping the part of `value`.

    `value` is the parameter as it rests; where it rests whole, or the gradient is scattered already, nothing happens.
    """
    if not is_matrix(dims) or grad.shape == value.shape:
        return grad
    axes, dim = shard_axes(dims), zero_dim(dims)
    return jax.lax.psum_scatter(row_major(grad), axes, scatter_dimension=dim, tiled=True)


def reduce_gradient(grad: jax.Array, dims: str, value: jax.Array) -> jax.Array:
    """On pieces: the gradient of `value`, a parameter as it rests, from the devices' partial sums."""
    grad = scatter_gradient(grad, dims, value)
    axes = tuple(sorted(varying(grad) - varying(value)))
    return jax.lax.psum(grad, axes) if axes else grad


def _varying_axes(dims: str, on: str) -> frozenset[str]:
    """Axes over which a parameter differs or meets different values.

    They are those of its own letters, even where it rests whole (few kv heads), those of what it meets, and pp.
    """
    pipeline = {"pp"} if mesh_size("pp") > 1 else set()
    return axes_of(dims + on) | pipeline


def row_major(weight: jax.Array) -> jax.Array:
    """The same weight, and its gradient, with the last dim contiguous in memory.

    An all-gather wants its dim to be the slowest. Left alone, XLA lays out the whole stack of `w_down` and `w_o` so,
    and the optimizer copies it back: 1.1 GiB for Llama-3-8B on 8 GPUs. Told here, it turns only one layer's shard.
    """
    return (
        with_layout_constraint(weight, Layout(tuple(range(weight.ndim))))
        if weight.ndim > 1
        else weight
    )


def gather_sequence(x_BRD: jax.Array, dim: str = "F") -> jax.Array:
    """The residual stream whole over sp, for matmuls with weights whose `dim` is split: an all-gather (Megatron's g).

    Its cotangent is left unreduced over the axes of `dim`, F (the tensor group) or V (with pp), so that the backward
    pass is one reduce-scatter.
    """
    return reshard("BRD->BTD", x_BRD, reduced=axes_of(dim))


def scatter_sequence(partial_BTD: jax.Array) -> jax.Array:
    """The residual stream from partial sums of a tensor group: a reduce-scatter over sp (Megatron's g-bar)."""
    return reshard("BTD->BRD", partial_BTD, summed=frozenset(TENSOR))


def embed_lookup(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Rows of the embedding table as the residual stream `[B, R, D]`; on pieces a partial sum over pp.

    The table's D is split over the tensor group for the look-up. Then D travels back: an all-to-all over sp, which
    splits the sequence, and an all-gather over tp. On pieces each device looks up the rows that it has, all-reduced.
    """
    if manual():
        rows = tokens_BT - offset("V", table_VD.shape[0])
        rows_of = table_VD.at[rows]
        x_BTD = rows_of.get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return scatter_sequence(x_BTD)
    (batch,), (sequence,), (rest,) = (act(dim).partitions for dim in "BTR")
    # Two moves, not one: XLA gives a wrong gradient for a reshard that gathers over one axis and moves another.
    reduced = gradient_axes("VD", "BT")
    if mesh_size("pp") > 1:
        table_VD = jax.reshard(table_VD, P(TENSOR, None, reduced=reduced))
    table_VD = jax.reshard(table_VD, P(None, ("tp", "sp"), reduced=reduced))
    x_BTD = table_VD.at[tokens_BT].get(out_sharding=P(batch, sequence, ("tp", "sp")), mode="clip")
    x_BRD = jax.reshard(x_BTD, P(batch, rest, "tp"))
    return jax.reshard(x_BRD, act("BRD"))


def repeat_kv_heads(weight: jax.Array, dims: str, on: str, num_kv_heads: int) -> jax.Array:
    """A parameter, its kv heads repeated up to one for each member of a larger tensor group.

    Each device then computes only the head it needs; the weights' gradient is summed over the copies.
    """
    copies = mesh_size(*TENSOR) // num_kv_heads
    if "K" not in dims or copies <= 1:
        return weight
    axis = dims.index("K")
    if manual():
        return jax.lax.dynamic_slice_in_dim(weight, offset("K", 1) // copies, 1, axis)
    shape = (*weight.shape[: axis + 1], copies, *weight.shape[axis + 1 :])
    weight = jnp.broadcast_to(jnp.expand_dims(weight, axis + 1), shape)
    weight = weight.reshape(*shape[:axis], -1, *shape[axis + 2 :])
    spec = gathered(dims, weight.shape, reduced=gradient_axes(dims, on))
    return jax.reshard(weight, spec)


def broadcast_param(weight: jax.Array, dims: str, to: str, shape: tuple[int, ...]) -> jax.Array:
    """A vector parameter (`dims`) broadcast over an activation with dims `to`, its gradient summed locally only."""
    if manual():
        return jax.lax.broadcast_in_dim(weight, shape, tuple(to.index(dim) for dim in dims))
    return _spread(weight, dims, to, shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _spread(weight, dims, to, shape):
    spec = act(to)
    whole = jax.reshard(weight, P(*jax.typeof(weight).sharding.spec.partitions))
    return jax.lax.broadcast_in_dim(
        whole, shape, tuple(to.index(dim) for dim in dims), out_sharding=spec
    )


def _spread_forward(weight, dims, to, shape):
    return _spread(weight, dims, to, shape), None


def _spread_backward(dims, to, shape, _, g):
    summed = tuple(i for i, dim in enumerate(to) if dim not in dims)
    return (
        jax.lax.reduce_sum(g, summed, out_sharding=act(dims, unreduced=gradient_axes(dims, to))),
    )


_spread.defvjp(_spread_forward, _spread_backward)


def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    dims: str,
    on: str,
    eps: float,
    implementation: Implementation = "auto",
) -> jax.Array:
    """x / rms(x) * weight over the dims of `weight`, in float32, back in x's type (arXiv 1910.07467).

    The kernel takes a norm over the last dim, whole on each device.
    """
    if implementation == "mosaic":
        fused = functools.partial(rms_norm_of_pieces, eps=eps, implementation=implementation)
        return smap(fused, in_specs=specs((x, weight)), out_specs=act(on))(x, weight)
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(mean(jnp.square(x32), dims, on) + eps)
    return (x32 * scale * broadcast_param(weight, dims, on, x.shape)).astype(x.dtype)


class MLP(nnx.Module):
    """Gated feed-forward layer: (silu(x w_gate) * (x w_up)) w_down (arXiv 2002.05202)."""

    def __init__(self, cfg: ModelConfig, key: jax.Array, d_ff: int | None = None):
        k_gate, k_up, k_down = jax.random.split(key, 3)
        D, F = cfg.d_model, d_ff or cfg.d_ff
        self.w_gate = param(k_gate, "DF", "BTD", (D, F))
        self.w_up = param(k_up, "DF", "BTD", (D, F))
        self.w_down = param(k_down, "FD", "BTF", (F, D), std=INIT_STD / (2 * cfg.num_layers) ** 0.5)

    def __call__(self, x_BRD: jax.Array) -> jax.Array:
        """`[B, R, D]` to `[B, R, D]`: all-gather over sp, two matmuls, one, reduce-scatter."""
        x_BTD = gather_sequence(x_BRD)
        gate_BTF = checkpoint_name(linear("BTD,DF->BTF", x_BTD, self.w_gate[...]), "gate")
        up_BTF = checkpoint_name(linear("BTD,DF->BTF", x_BTD, self.w_up[...]), "up")
        return linear("BTF,FD->BTD", jax.nn.silu(gate_BTF) * up_BTF, self.w_down[...], to="BRD")
