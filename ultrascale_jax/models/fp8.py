"""Products with parameters in fp8: what is quantised, with which scales, forward and backward.

    scaling  x (rows of tokens)          w                 gradient of y             products on GPUs
    tensor   one scale for each device   one scale         one scale                 cuBLASLt
    row      one for each token          one for a column  one for each token        cuBLASLt, scales applied after it
    block    1 x 128                     128 x 128         1 x 128                   `kernels/fp8_matmul.py`
    mx       1 x 32                      1 x 32            1 x 32                    cuDNN, on Blackwell

Every product contracts dims that both operands have at their ends, so each operand is quantised along the dim that is
contracted: x and the gradient of y once for the forward pass (or the input's gradient) and once, along the tokens, for
the weight's gradient. The forward pass keeps fp8 for the backward pass: x in the form that the weight's gradient takes.

Scales are powers of 2, made of the values at hand (current scaling), on this device's shards: another mesh changes only
what is too small to be held. A key head that `tp` replicates is the exception: each replica quantises the gradient of
its query heads. Two replicas give a weight gradient that is as near to the exact one as one device's, and 4% (e4m3) or
7% (e5m2) from that one.

ZeRO gathers fp8 and not bfloat16 where a shard can be quantised by itself: with
per-tensor scales, which `weight_amaxes` finds once a step, in one reduction, and with blocks of 32 that lie within
shards, in the orientation that the pass multiplies. Experts' matrices are gathered in bfloat16. Matrices below adapters
do not change: `frozen_fp8.py` quantises them once.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr

from ultrascale_jax.config import require, require_choice
from ultrascale_jax.kernels.device import device, match_vma, on_gpu, on_hopper
from ultrascale_jax.kernels.fp8_matmul import fp8_matmul
from ultrascale_jax.kernels.quantize_fp8 import (
    BLOCK,
    E8M0,
    MX_BLOCK,
    Quantized,
    quantize_fp8,
    quantize_fp8_both,
    scale_of,
)
from ultrascale_jax.sharding.manual import leave_partial, smap
from ultrascale_jax.sharding.primitives import shard_shape
from ultrascale_jax.sharding.rules import is_matrix, is_of_experts, mesh_size, specs, vary, varying

Scaling = Literal["tensor", "row", "block", "mx"]
Gradient = Literal["e4m3", "e5m2"]
Wgrad = Literal["fp8", "bf16"]
Implementation = Literal["auto", "xla", "mosaic"]

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2

AMAXES = "amaxes"
"""Name in a module of the largest magnitudes of its matrices that are stored in fp8."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of the products with parameters in fp8; `train_step/precision.py` has a run's."""

    scaling: Scaling
    gradients: Gradient
    """Type of the gradient of a product's result."""
    wgrad: Wgrad
    """Type in which the weight's gradient is multiplied."""
    implementation: str
    """Implementation of products with scales for each block."""
    bf16_first: int = 0
    """First layers that stay in the type of compute."""
    bf16_last: int = 0
    """Last layers that stay in the type of compute."""

    def __post_init__(self):
        for name, choices in (("scaling", Scaling), ("gradients", Gradient), ("wgrad", Wgrad)):
            require_choice(name, getattr(self, name), choices)
        require_choice("implementation", self.implementation, Implementation)
        fix = "scaling='mx' multiplies e4m3 alone; use gradients='e4m3'"
        fits = self.scaling != "mx" or self.gradients == "e4m3"
        require(fits, "gradients", self.gradients, fix)

    def covers(self, layer: int, num_layers: int) -> bool:
        """Return whether the products of this layer are in fp8."""
        return self.bf16_first <= layer < num_layers - self.bf16_last


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8:
    """The recipe and scales of a step's products in fp8."""

    recipe: Recipe = dataclasses.field(metadata={"static": True})
    amaxes: dict[str, jax.Array]
    """Largest magnitudes of the layers' matrices by their path in a block, `[num_layers]` each; only for `tensor`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Weight:
    """A matrix as it is used in fp8."""

    value: jax.Array | None
    """In the type of compute; None: it is stored in fp8 and has no gradient. With `quantised` only its gradient is of
    use, and XLA drops its operations."""
    quantised: tuple[Quantized, ...]
    """The same in e4m3 as bytes (`as_bits`), where it was quantised before it was gathered: with one scale, or with
    `mx` along the dims that products contract, and along the others."""
    recipe: Recipe = dataclasses.field(metadata={"static": True})

    def __getitem__(self, index: Any) -> "Fp8Weight":
        """Return itself, whole: a module reads its parameters as `param[...]`."""
        assert index is ...
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the matrix."""
        return jax.tree.leaves(self)[0].shape

    def map(self, fn: Callable[[jax.Array], jax.Array]) -> "Fp8Weight":
        """Apply `fn` to the arrays that have the dims of the matrix."""
        arrays = self.value, self.quantised
        value, quantised = jax.tree.map(lambda a: fn(a) if a.ndim else a, arrays)
        return dataclasses.replace(self, value=value, quantised=quantised)


def is_variable(leaf: object) -> bool:
    return isinstance(leaf, nnx.Variable)


def in_fp8(dims: str) -> bool:
    """Return whether a parameter of a block is a matrix whose products are in fp8: no router's, no adapter's."""
    return is_matrix(dims) and not {"X", "U"} & set(dims)


def quantise_shards(
    w: jax.Array, contracted: int, recipe: Recipe, amax: jax.Array | None
) -> tuple[Quantized, ...]:
    """Return `Fp8Weight.quantised` of a stored matrix, whose first `contracted` dims products contract.

    `amax` is its largest magnitude, for one scale, with which it may be stored in fp8. No block of `mx` may cross
    shards, so each device's size of the last dim of either kind must be a multiple of 32; else, and with other scales,
    the result is empty.
    """
    if amax is not None:
        at_rest = Quantized(w, scale_of(amax, E4M3)) if w.dtype == E4M3 else None
        values, scale = at_rest or quantize_fp8(w, "tensor", amax=amax)
        return (Quantized(as_bits(values), scale),)
    ends = contracted - 1, w.ndim - 1
    shard = shard_shape(w)
    if recipe.scaling != "mx" or any(shard[dim] % MX_BLOCK for dim in ends):
        return ()

    def run(w):
        along_N, along_K = quantize_fp8_both(w.reshape(math.prod(w.shape[:contracted]), -1), "mx")

        def in_dims(q: Quantized, end: int) -> Quantized:
            scales = [size // (MX_BLOCK if dim == end else 1) for dim, size in enumerate(w.shape)]
            return Quantized(as_bits(q.values).reshape(w.shape), as_bits(q.scales).reshape(scales))

        return tuple(in_dims(q, end) for q, end in zip((along_K.T, along_N), ends, strict=True))

    spec = specs(w)
    return smap(run, in_specs=spec, out_specs=(Quantized(spec, spec),) * 2)(w)


def weight_amaxes(
    stacks: Sequence[Any], orders: Sequence[Sequence[int | None]], num_layers: int
) -> dict[str, jax.Array]:
    """Return `Fp8.amaxes` of the stored parameters of a `Transformer`'s stacks, in one reduction over all devices.

    Layers without a matrix have 0 in its place. The amaxes of matrices in fp8 are stored with them (`AMAXES`). With
    pp > 1 call it on shards.
    """
    matrices = []
    for stack, order in zip(stacks, orders, strict=True):
        by_path = {
            keystr(path, simple=True, separator="."): variable
            for path, variable in jax.tree.leaves_with_path(stack, is_leaf=is_variable)
        }
        for path, variable in by_path.items():
            if in_fp8(variable.dims) and not is_of_experts(variable.dims):
                *outer, name = path.split(".")
                amax = by_path.get(".".join([*outer, AMAXES, name]), variable)
                matrices.append((order, path, amax.get_value()))

    def run(values):
        ends = np.cumsum([len(value) for value in values])
        amaxes = [jnp.max(jnp.abs(value), tuple(range(1, value.ndim))) for value in values]
        amaxes = jnp.concatenate(match_vma(*amaxes)).astype(jnp.float32)
        axes = tuple(sorted(varying(amaxes) - {"pp"}))
        amaxes = jax.lax.pmax(amaxes, axes) if axes else amaxes
        amaxes = jax.lax.all_gather(amaxes, "pp") if mesh_size("pp") > 1 else amaxes[None]
        return [part.reshape(-1) for part in jnp.split(amaxes, ends[:-1], axis=1)]

    values = [jax.lax.stop_gradient(value) for _, _, value in matrices]
    everywhere = [P()] * len(values)
    of_stacks = smap(run, in_specs=(specs(values),), out_specs=everywhere)(values)
    amaxes: dict[str, jax.Array] = {}
    for (order, path, _), by_row in zip(matrices, of_stacks, strict=True):
        layers = sorted(layer for layer in order if layer is not None)
        rows = np.array([order.index(layer) for layer in layers])
        by_layer = amaxes.get(path, jnp.zeros(num_layers))
        amaxes[path] = by_layer.at[np.array(layers)].set(by_row[rows])
    return amaxes


def fp8_product(subscripts: str, x: jax.Array, w: Fp8Weight, *, out_sharding: P, **_) -> jax.Array:
    """Compute `jnp.einsum` in fp8, on this device's shards."""
    inputs, out = subscripts.split("->")
    contracted = len(set(inputs.split(",")[1]) - set(out))

    def run(x, w: Fp8Weight):
        tokens, features = x.shape[:-contracted], w.shape[contracted:]
        w = w.map(lambda a: a.reshape(math.prod(a.shape[:contracted]), -1))
        x, w = match_vma(x.reshape(-1, w.shape[0]), w)
        # JAX would give float8 values cotangents of the wrong type.
        y = multiply(w.recipe, x, w.value, *jax.lax.stop_gradient(w.quantised))
        return leave_partial(y.reshape(*tokens, *features), out_sharding.unreduced)

    return smap(run, in_specs=specs((x, w)), out_specs=out_sharding)(x, w)


def fp8_dot(
    x: jax.Array,
    w: jax.Array,
    *,
    scaling: Scaling = "row",
    gradients: Gradient = "e5m2",
    wgrad: Wgrad = "fp8",
    implementation: Implementation = "auto",
) -> jax.Array:
    """Multiply `[..., K]` by `[K, N]` in fp8, forward and backward; the table of `models/fp8.py` has the scales.

    Where a mesh splits x or w, call it in `jax.shard_map`: each device scales its shards.

    Args:
      x: float array; its leading dims are rows, or tokens.
      w: float matrix.
      scaling: `tensor`, `row`, `block` or `mx`, with one scale for a tensor, a row, 128 or 32 elements of a row.
      gradients: type of the gradient of the result; `mx` needs e4m3.
      wgrad: type in which the gradient of w is multiplied.
      implementation: of products with `block`: Mosaic's kernel needs a Hopper GPU and sizes in multiples of 128.

    Returns:
      `[..., N]` in x's type. Gradients have the types of x and w. On GPUs with fp8 the products are cuBLASLt's.

    Raises:
      UserError: shapes or types do not fit, or a setting is unknown.
    """
    recipe = Recipe(scaling, gradients, wgrad, implementation)
    fits = x.ndim > 0 and w.ndim == 2 and x.shape[-1] == w.shape[0]
    require(fits, "x and w", f"{x.shape} and {w.shape}", "must be [..., K] and [K, N]")
    for name, array in (("x", x), ("w", w)):
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        require(is_float, name, array.dtype, "must be a float array")
    rows, w = match_vma(x.reshape(-1, x.shape[-1]), w)
    y = multiply(recipe, rows, w.astype(x.dtype))
    return y.reshape(*x.shape[:-1], w.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(recipe: Recipe, x: jax.Array, w: jax.Array | None, *quantised: Quantized) -> jax.Array:
    """Multiply x `[..., M, K]` by w `[..., K, N]`, shards that vary over the same axes; the result has x's type.

    `quantised` is `Fp8Weight.quantised` of w. Without w it is what is multiplied, and has no gradient.
    """
    return _forward(recipe, x, w, *quantised)[0]


def _forward(recipe, x, w, *quantised):
    x_MK, x_KM = _both(recipe, x, E4M3)
    kept = x if recipe.wgrad == "bf16" else x_KM
    kept = None if w is None else kept
    w_NK = _weight(recipe, w, quantised)[1]
    y = _product_of(recipe, x_MK, w_NK, x.dtype)
    return y, (jax.tree.map(as_bits, kept), None if quantised else w, quantised)


def _backward(recipe, saved, g):
    x, w, quantised = saved
    g_MN, g_NM = _both(recipe, g, E4M3 if recipe.gradients == "e4m3" else E5M2)
    w_KN, _ = _weight(recipe, w, quantised)
    dx = _product_of(recipe, g_MN, w_KN, g.dtype, exact=True)
    if x is None:
        dw = None
    elif recipe.wgrad == "bf16":
        dw = jnp.swapaxes(x, -1, -2) @ g
    else:
        dw = _product_of(recipe, _from_bits(x), g_NM, g.dtype, exact=True)
    return dx, dw, *[None for _ in quantised]


multiply.defvjp(_forward, _backward)


def as_bits(x: jax.Array) -> jax.Array:
    """View float8 as bytes: `jax.checkpoint` keeps values by `reduce_precision`, which turns 256 to 448 into NaN."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8) if x.dtype in (E4M3, E8M0) else x


def _from_bits(q: Quantized) -> Quantized:
    return Quantized(
        *(
            jax.lax.bitcast_convert_type(bits, dtype) if bits.dtype == jnp.uint8 else bits
            for bits, dtype in zip(q, (E4M3, E8M0), strict=True)
        )
    )


def _both(recipe: Recipe, x: jax.Array, dtype) -> tuple[Quantized, Quantized]:
    """Quantise x `[..., M, K]` along K, and its transpose `[..., K, M]` along M."""
    if recipe.scaling == "tensor":
        q = quantize_fp8(x, "tensor", dtype=dtype)
        return q, q.T
    fitting = _fitting_quantiser(recipe, x)
    return quantize_fp8_both(x, recipe.scaling, dtype=dtype, implementation=fitting)


def _fitting(recipe: Recipe, *sizes: int) -> str:
    """Choose the implementation for arrays with these dims; warn where `auto` is XLA's on a GPU."""
    if recipe.scaling != "block":
        return "xla"
    fits = on_hopper() and all(size % BLOCK == 0 for size in sizes)
    if recipe.implementation == "auto" and on_gpu() and not fits:
        warnings.warn(
            f"train.precision='fp8_block': products of {list(sizes)} on a {device().device_kind} are XLA's in float32, "
            f"slower than bfloat16. The kernels want a Hopper GPU and multiples of {BLOCK}; use fp8 or fp8_rowwise",
            stacklevel=2,
        )
    return recipe.implementation


def _fitting_quantiser(recipe: Recipe, x: jax.Array) -> str:
    """Choose the implementation for one array: the kernels take no groups."""
    return _fitting(recipe, *x.shape) if x.ndim == 2 else "xla"


def _weight(recipe: Recipe, w, quantised) -> tuple[Quantized, Quantized]:
    """Quantise w `[..., K, N]` along N, and its transpose `[..., N, K]` along K."""
    if quantised:
        along_K, along_N = map(_from_bits, (quantised[0], quantised[-1]))
        return along_N, along_K.T
    if recipe.scaling == "tensor":
        q = quantize_fp8(w, "tensor")
        return q, q.T
    if recipe.scaling in ("row", "mx"):
        return quantize_fp8_both(w, recipe.scaling)
    tiles = quantize_fp8(w, "tile", implementation=_fitting_quantiser(recipe, w))
    return tiles, tiles.T


def _product_of(recipe: Recipe, a: Quantized, b: Quantized, dtype, exact: bool = False):
    """Multiply a `[..., M, K]` by the transpose of b `[..., N, K]`, in `dtype`.

    XLA compiles this to an fp8 product on GPUs: types and a scalar scale outside of it, in `dtype`, other scales after
    it. `exact` asks cuBLASLt for sums in float32 (gradients), else it takes fewer bits and is faster.
    """
    if recipe.scaling == "mx":
        return _mx_product(a, b, dtype)
    if recipe.scaling == "block":
        fitting = _fitting(recipe, a.values.shape[-2], *b.values.shape[-2:])
        return fp8_matmul(a, b, out_dtype=dtype, implementation=fitting)
    values, scalar = [q.values.astype(dtype) for q in (a, b)], recipe.scaling == "tensor"
    if scalar:
        values = [v * q.scales.astype(dtype) for v, q in zip(values, (a, b), strict=True)]
    precision = "highest" if exact else None
    left, right = values
    *batch, _, K = range(left.ndim)
    dims = ((K,), (K,)), (batch, batch)
    y = jax.lax.dot_general(left, right, dims, precision=precision, preferred_element_type=dtype)
    if scalar:
        return y
    return (y.astype(jnp.float32) * a.scales * jnp.swapaxes(b.scales, -1, -2)).astype(dtype)


def _mx_product(a: Quantized, b: Quantized, dtype) -> jax.Array:
    """Multiply a `[..., M, K]` by the transpose of b `[..., N, K]`, both in blocks of 1 x 32."""
    missing = -a.values.shape[-1] % MX_BLOCK

    def operands(q: Quantized) -> tuple[jax.Array, jax.Array]:
        values = jnp.pad(q.values, [(0, 0)] * (q.values.ndim - 1) + [(0, missing)])
        values, scales = (
            a.reshape(*a.shape[:-2] or (1,), *a.shape[-2:]) for a in (values, q.scales)
        )
        return values, scales

    (left, left_scales), (right, right_scales) = map(operands, (a, b))
    y = jax.nn.scaled_matmul(left, right, left_scales, right_scales, preferred_element_type=dtype)
    y = vary(y, varying(left))  # JAX's primitive types its result as the same on all devices
    return y.reshape(*a.values.shape[:-2], *y.shape[1:])
