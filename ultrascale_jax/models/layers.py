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
from ultrascale_jax.sharding import TENSOR, act, axes_of, einsum, gathered, is_matrix, stored

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
    """A parameter in the type of compute; vectors (norm scales and biases) stay float32."""
    return value.astype(dtype) if is_matrix(dims) else value


def gather_param(value: jax.Array, dims: str, on: str, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A parameter as it is used: cast, and whole over (fsdp, cp, ep), an all-gather where it rests sharded.

    Its cotangent stays unreduced over the axes that split what it meets.
    """
    spec = gathered(dims, value.shape, reduced=gradient_axes(dims, on))
    return jax.reshard(row_major(cast(value, dims, dtype)), spec)


def gather[M](module: M, dtype: jax.typing.DTypeLike) -> M:
    """All of a module's parameters as they are used: ZeRO-3's all-gathers of one layer."""
    return map_params(lambda value, dims, on: gather_param(value, dims, on, dtype), module)


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


@jax.custom_vjp
def together(tree):
    """`tree` itself; in the backward pass no gradient of it is used before all of them are there.

    With a half-block's input and weights in it, the reduce-scatter of the input's gradient runs beside the matmuls of
    the weights' gradients, as in Megatron; XLA's scheduler would leave them for later and wait. Without it
    the feed-forward layer's activations also live on through the backward pass of attention.
    """
    return tree


together.defvjp(
    lambda tree: (tree, None), lambda _, gradient: (jax.lax.optimization_barrier(gradient),)
)


def gather_sequence(x_BRD: jax.Array) -> jax.Array:
    """The residual stream whole over sp, for the matmuls of a tensor group: an all-gather (Megatron's g).

    Its cotangent is left unreduced over the tensor group, so that the backward pass is one reduce-scatter.
    """
    return jax.reshard(x_BRD, act("BTD", reduced=frozenset(TENSOR)))


def spread(weight: jax.Array, dims: str, to: str, shape: tuple[int, ...]) -> jax.Array:
    """A vector parameter (`dims`) broadcast over an activation with dims `to`, its gradient summed locally only."""
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


def rms_norm(x: jax.Array, weight: jax.Array, dims: str, on: str, eps: float) -> jax.Array:
    """x / rms(x) * weight over the dims of `weight`, in float32, back in x's type (arXiv 1910.07467)."""
    x32 = x.astype(jnp.float32)
    over = tuple(on.index(dim) for dim in dims)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), over, keepdims=True) + eps)
    return (x32 * scale * spread(weight, dims, on, x.shape)).astype(x.dtype)


def rotary(positions_BT: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine `[B, T, H/2]` float32 of the rotary angles (arXiv 2104.09864), stretched as Llama 3 does."""
    half = jnp.arange(0, cfg.head_dim, 2, dtype=jnp.float32) / cfg.head_dim
    frequency = cfg.rope_theta**-half
    if cfg.rope_scaling is not None:
        s = cfg.rope_scaling
        turns = s.original_seq_len * frequency / (2 * jnp.pi)
        smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        smooth = jnp.clip(smooth, 0.0, 1.0)
        frequency = (1 - smooth) * frequency / s.factor + smooth * frequency
    angle = positions_BT.astype(jnp.float32)[:, :, None] * frequency[None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTNH: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding of queries or keys: the first half of H pairs with the second (Hugging Face's convention)."""
    cos, sin = (t[:, :, None, :] for t in rope)
    x1, x2 = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x_BTNH.dtype)


class MLP(nnx.Module):
    """Gated feed-forward layer: (silu(x w_gate) * (x w_up)) w_down (arXiv 2002.05202)."""

    def __init__(self, cfg: ModelConfig, key: jax.Array):
        k_gate, k_up, k_down = jax.random.split(key, 3)
        D, F = cfg.d_model, cfg.d_ff
        self.w_gate = param(k_gate, "DF", "BTD", (D, F))
        self.w_up = param(k_up, "DF", "BTD", (D, F))
        self.w_down = param(k_down, "FD", "BTF", (F, D), std=INIT_STD / (2 * cfg.num_layers) ** 0.5)

    def __call__(self, x_BRD: jax.Array) -> jax.Array:
        """`[B, R, D]` to `[B, R, D]`: all-gather over sp, two matmuls, one, reduce-scatter."""
        x_BTD = gather_sequence(x_BRD)
        gate_BTF = checkpoint_name(einsum("BTD,DF->BTF", x_BTD, self.w_gate[...]), "gate")
        up_BTF = checkpoint_name(einsum("BTD,DF->BTF", x_BTD, self.w_up[...]), "up")
        return einsum("BTF,FD->BTD", jax.nn.silu(gate_BTF) * up_BTF, self.w_down[...], to="BRD")
