"""Parameters that know their dims, and the two layers that every decoder shares: RMSNorm and the MLP."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import ModelConfig, padded_vocab_size, require, require_choice
from ultrascale_jax.config.kernels import Implementation
from ultrascale_jax.kernels.rms_norm import rms_norm as rms_norm_of_pieces
from ultrascale_jax.models.fp8 import E4M3, Fp8Weight, Recipe, is_variable, quantise_shards
from ultrascale_jax.models.linear import linear
from ultrascale_jax.parallel.gate import gated
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.primitives import (
    broadcast_param,
    gather_param,
    mean,
    reshard,
    shard_shape,
)
from ultrascale_jax.sharding.rules import (
    TENSOR,
    act,
    act_axes,
    axes_of,
    check_letters,
    is_of_experts,
    mesh_size,
    out_sharding,
    place,
    present,
    specs,
    stored_spec,
    zero_dim,
)

INIT_STD = 0.02


def param(
    key: jax.Array | None,
    dims: str,
    act_dims: str,
    shape: tuple[int, ...],
    *,
    std: float = INIT_STD,
    multiplier: float = 1.0,
) -> nnx.Param:
    """Make a float32 parameter with these dims; the activation that it is multiplied with has `act_dims`.

    Without a key it is made of ones, `std=1` (norm scales), or zeros, `std=0` (biases).

    Args:
      key: of the normal distribution from which it is drawn.
      dims: a letter of the alphabet for each dim (`sharding/rules.py`), which says how it is split. A matrix that maps
        D to others is split by ZeRO too, and cast to the type of compute; all else stays float32.
      act_dims: letters of an activation, whose axes are those over which the gradient is a sum.
      shape: sizes of the whole. Zeros follow its V where the mesh does not divide it.
      std: standard deviation.
      multiplier: constant by which a layer's matrix is multiplied where it is gathered.

    Raises `UserError` for unknown letters, and sizes that the mesh does not divide. K and V are not checked:
    `Attention` repeats few key heads. In an attention of your own K must be a multiple of the tensor group, too.
    """
    fix = "give one, from which values are drawn; or std=1 for ones, 0 for zeros"
    require(key is not None or std in (0, 1), "key", key, fix)
    check_letters("dims", dims)
    check_letters("act_dims", act_dims)
    _check_shape(dims, shape)
    spec = out_sharding(stored_spec(dims, shape))
    if key is None:
        value = jnp.full(shape, std, jnp.float32, out_sharding=spec)
    else:
        value = std * jax.random.normal(key, shape, jnp.float32, out_sharding=spec)
    return nnx.Param(_padded(value, dims), dims=dims, act_dims=act_dims, multiplier=multiplier)


def _check_shape(dims: str, shape: tuple[int, ...]) -> None:
    """Refuse another number of sizes than letters, and sizes that the mesh does not divide."""
    fix = f"dims={dims!r} has {len(dims)} letters; give as many sizes"
    require(len(dims) == len(shape), "shape", shape, fix)
    for letter, size in zip(dims, shape, strict=True):
        # Few kv heads are repeated, and a vocabulary is padded.
        axes = () if letter in "KV" else act_axes(letter)
        fix = f"{letter} is {size}, and must be divisible by mesh.{'*mesh.'.join(axes)}={mesh_size(*axes)}"
        require(size % mesh_size(*axes) == 0, "shape", shape, fix)


def _padded(value: jax.Array, dims: str) -> jax.Array:
    """Pad a vocabulary with zeros, so that the mesh divides it; the words' numbers are the same on any mesh."""
    if "V" not in dims:
        return value
    dim, parts = dims.index("V"), mesh_size(*act_axes("V"))
    padding = [(0, 0, 0)] * value.ndim
    padding[dim] = (0, padded_vocab_size(value.shape[dim], parts) - value.shape[dim], 0)
    padded = jax.lax.pad(value, jnp.float32(0), padding)
    return place(padded, stored_spec(dims, padded.shape))


def map_params[M](fn: Callable[..., Any], module: M, *modules: M) -> M:
    """Replace each parameter of `module` by `fn(array, dims, act_dims, *arrays of modules)`.

    The dims of a stacked parameter start with L. One without an array (`models/lora.py`) stays as it is.
    """

    def apply(variable, *variables):
        value = variable.get_value()
        if value is None:
            return variable
        dims, act_dims = variable.dims, variable.act_dims
        stacked = "L" if value.ndim == len(dims) + 1 else ""
        return variable.replace(
            fn(value, stacked + dims, act_dims, *(other.get_value() for other in variables))
        )

    return jax.tree.map(apply, module, *modules, is_leaf=lambda x: isinstance(x, nnx.Variable))


def each_param(fn: Callable[..., Any], module: Any) -> list:
    """Return `fn(array, dims, act_dims)` of each parameter of `module`, in the order of its leaves."""
    results = []

    def visit(value, dims, act_dims):
        results.append(fn(value, dims, act_dims))
        return value

    map_params(visit, module)
    return results


def zero_sizes(cfg: ModelConfig, params: Any = None) -> dict[str, int]:
    """Return the full sizes of the dims that ZeRO splits, by letter: with `params` also the rank of their adapters."""
    latent = cfg.latent
    latents = {} if latent is None else {"Q": latent.q_rank, "J": latent.kv_rank}
    rank = max(map(_rank, jax.tree.leaves(params, is_leaf=is_variable)), default=0)
    return {"D": cfg.d_model} | latents | ({"U": rank} if rank else {})


def _rank(param: nnx.Param) -> int:
    """Return the rank that a parameter of an adapter has, 0 if ZeRO may split it: one of the two has another dim."""
    dims, value = param.dims, param.get_value()
    whole = "U" in dims and value is not None and dims[zero_dim(dims)] != "U"
    return value.shape[dims.index("U") - len(dims)] if whole else 0


def gather_params[M](
    module: M, dtype: jax.typing.DTypeLike, sizes: Mapping[str, int] | None = None
) -> M:
    """Apply `gather_param` to each parameter of `module`, or to one parameter.

    `sizes` are needed in a region that is manual over all axes.
    """

    def leaf(param):
        placed = param.get_value(), param.dims, param.act_dims
        return param.replace(gather_param(*placed, dtype, sizes))

    return jax.tree.map(leaf, module, is_leaf=is_variable)


def gather_fp8(
    value: jax.Array,
    dims: str,
    act_dims: str,
    dtype: jax.typing.DTypeLike,
    sizes: Mapping[str, int],
    recipe: Recipe,
    amax: jax.Array | None,
) -> Fp8Weight:
    """Gather a parameter for products in fp8, in fp8 where its shards are or can be quantised (`quantise_shards`)."""
    whole = None if value.dtype == E4M3 else gather_param(value, dims, act_dims, dtype, sizes)
    value = jax.lax.stop_gradient(value if whole is None else value.astype(dtype))
    # Without a gradient it is no longer `reduced`.
    value = jax.reshard(value, P(*jax.typeof(value).sharding.spec.partitions))
    is_whole = shard_shape(value)[zero_dim(dims)] == sizes[dims[zero_dim(dims)]]
    if is_of_experts(dims) or (amax is None and is_whole):
        return Fp8Weight(whole, (), recipe)

    def gather(a):
        return gather_param(a, dims, act_dims, jnp.uint8, sizes) if a.ndim else a

    quantised = quantise_shards(value, sum(dim in act_dims for dim in dims), recipe, amax)
    return Fp8Weight(whole, jax.tree.map(gather, quantised), recipe)


def gather_sequence(x_BRD: jax.Array, dim: str = "F") -> jax.Array:
    """All-gather the residual stream over sp, for matmuls with weights whose `dim` is split (Megatron's g).

    Its cotangent is left unreduced over the axes of `dim`, F (the tensor group) or V (with pp), so that the backward
    pass is one reduce-scatter.
    """
    return reshard("BRD->BTD", x_BRD, reduced=axes_of(dim))


def scatter_sequence(partial_BTD: jax.Array) -> jax.Array:
    """Reduce-scatter partial sums of a tensor group to the residual stream over sp (Megatron's g-bar)."""
    return reshard("BTD->BRD", partial_BTD, summed=frozenset(present(TENSOR)))


def rms_norm(
    x: jax.Array,
    weight: jax.Array | None,
    dims: str,
    act_dims: str,
    eps: float,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Compute x / rms(x) * weight over the dims of `weight`, in float32, back in x's type (arXiv 1910.07467).

    Without a weight it is x / rms(x). The kernel takes a norm over the last dim, unsharded on each device.
    """
    require_choice("implementation", implementation, Implementation)
    fix = "the kernel multiplies by a weight; give one, or use xla"
    require(weight is not None or implementation != "mosaic", "weight", weight, fix)
    if implementation == "mosaic":
        fused = functools.partial(rms_norm_of_pieces, eps=eps, implementation=implementation)
        return smap(fused, in_specs=specs((x, weight)), out_specs=act(act_dims))(x, weight)
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(mean(jnp.square(x32), dims, act_dims) + eps)
    y32 = x32 * scale
    if weight is not None:
        y32 *= broadcast_param(weight, dims, act_dims, x.shape)
    return y32.astype(x.dtype)


class MLP(nnx.Module):
    """Feed-forward layer: (silu(x w_gate) * (x w_up)) w_down (arXiv 2002.05202), or another activation; without
    w_gate for one of `GATELESS`."""

    def __init__(self, cfg: ModelConfig, key: jax.Array, d_ff: int | None = None):
        self.activation = cfg.activation
        k_gate, k_up, k_down = jax.random.split(key, 3)
        D, F = cfg.d_model, d_ff or cfg.d_ff
        gate, down = (cfg.multiplier(f"mlp_{name}") for name in ("gate", "down"))
        if cfg.is_gated:
            self.w_gate = param(k_gate, "DF", "BTD", (D, F), multiplier=gate)
        self.w_up = param(k_up, "DF", "BTD", (D, F))
        std = INIT_STD / (2 * cfg.num_layers) ** 0.5
        self.w_down = param(k_down, "FD", "BTF", (F, D), std=std, multiplier=down)

    def __call__(self, x_BRD: jax.Array) -> jax.Array:
        """Map `[B, R, D]` to `[B, R, D]`: all-gather over sp, two matmuls, one, reduce-scatter."""
        x_BTD = gather_sequence(x_BRD)
        gate_BTF = None
        if hasattr(self, "w_gate"):
            gate_BTF = checkpoint_name(linear("BTD,DF->BTF", x_BTD, self.w_gate[...]), "gate")
        up_BTF = checkpoint_name(linear("BTD,DF->BTF", x_BTD, self.w_up[...]), "up")
        h_BTF = gated(self.activation, gate_BTF, up_BTF)
        return linear("BTF,FD->BTD", h_BTF, self.w_down[...], to="BRD")
