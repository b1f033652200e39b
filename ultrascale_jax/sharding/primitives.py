"""Define the operations that communicate. Each has one meaning and two forms, an Explicit and a manual one.

    gather_param, keep_sharded         a parameter as the layers use it
    leave_sums                         the same, its gradient summed over replicas by each layer
    reduce_gradient, scatter_gradient  its gradient, summed over the devices
    reshard, einsum                    an activation with another sharding
    name_product                       a name for remat policies
    all_reduce, mean                   a reduction over dims that may be sharded
    partial_axes                       axes over which an activation may be a partial sum
    offset                             the global index of this device's first element
    shard_shape                        the shape of this device's shard
    broadcast_param, repeat_kv_heads   a parameter spread over an activation or over more heads
    embed_lookup                       rows of a sharded table

In an Explicit program an array is the global value, its type holds its sharding, and JAX communicates where types ask
for it. In a region that is manual over all axes (`rules.manual`) an array is this device's shard, and `jax.lax`
collectives do the same. Only this package asks which of the two holds, so a model's text has one meaning.
"""

import functools
from collections.abc import Callable, Mapping, Set
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import UserError, require, require_choice
from ultrascale_jax.kernels.xla import row_major
from ultrascale_jax.sharding.rules import (
    SHARD,
    TENSOR,
    act,
    act_axes,
    axes_of,
    check_letters,
    check_subscripts,
    gathered_spec,
    gradient_axes,
    is_matrix,
    manual,
    mesh_size,
    out_sharding,
    present,
    shard_axes,
    stored_spec,
    vary,
    varying,
    zero_dim,
)

PRODUCT = "product"
"""The name for `jax.checkpoint` of every product with parameters, summed over the devices that share it."""


def offset(dim: str, size: int) -> jax.Array | int:
    """Return the global index of the first of `size` elements of an activation's dim: 0 in an Explicit program."""
    axes = present(act_axes(dim))
    return jax.lax.axis_index(axes) * size if manual() and axes else 0


def partial_axes(x: jax.Array) -> frozenset[str]:
    """Return the axes over which `x` may be a partial sum: its type's `unreduced`, or a shard's varying axes."""
    return varying(x) if manual() else frozenset(jax.typeof(x).sharding.spec.unreduced)


Reduction = Literal["sum", "mean", "max"]


def all_reduce[Tree](tree: Tree, dims: str, op: Reduction = "sum") -> Tree:
    """Finish a reduction over activation `dims` that was computed on a local array.

    An Explicit program has reduced the global array already; a manual region reduces over the axes that shard these
    dims. `op="mean"` over equal values only changes their type: it marks a loss that every tensor rank computed as
    replicated.
    """
    require_choice("op", op, Reduction)
    axes = axes_of(dims)
    if not manual() or not axes:
        return tree
    if op == "sum":
        return jax.lax.psum(tree, tuple(sorted(axes)))
    reduce = jax.lax.pmean if op == "mean" else jax.lax.pmax

    def leaf(x):
        differs = tuple(sorted(axes & varying(x)))
        return reduce(x, differs) if differs else x

    return jax.tree.map(leaf, tree)


def mean(x: jax.Array, over: str, dims: str) -> jax.Array:
    """Average an activation with these `dims` over the dims `over`, which keep the size 1."""
    require(set(over) <= set(dims), "over", over, f"must be some of dims={dims!r}")
    y = jnp.mean(x, tuple(dims.index(dim) for dim in over), keepdims=True)
    return all_reduce(y, over, "mean")


def reshard(
    subscripts: str,
    x: jax.Array,
    *,
    summed: frozenset[str] = frozenset(),
    reduced: frozenset[str] = frozenset(),
) -> jax.Array:
    """Shard an activation as other letters say, and add its partial sums: `reshard("BRD->BTD", x)`.

    Args:
      subscripts: dims of `x` and of the result, of equal sizes. A letter over fewer axes all-gathers its dim, one over
        more axes reduce-scatters the sum.
      x: an activation, `unreduced` over `summed`.
      summed: axes over which `x` is a partial sum.
      reduced: axes over which the cotangent of the result stays a partial sum.
    """
    check_subscripts(subscripts)
    dims, to = subscripts.split("->")
    if not manual():
        y = jax.reshard(x, act(to, reduced=reduced))
        return checkpoint_name(y, PRODUCT) if summed else y
    x, all_reduced = vary(x, reduced), summed
    for i, (old, new) in enumerate(zip(dims, to, strict=True)):
        gathered = present(axis for axis in act_axes(old) if axis not in act_axes(new))
        scattered = present(axis for axis in act_axes(new) if axis not in act_axes(old))
        assert summed.issuperset(scattered), f"{subscripts}: only a sum is scattered"
        if mesh_size(*gathered) > 1:
            x = jax.lax.all_gather(x, gathered, axis=i, tiled=True)
        if mesh_size(*scattered) > 1:
            x = jax.lax.psum_scatter(x, scattered, scatter_dimension=i, tiled=True)
        all_reduced -= set(scattered)
    if all_reduced := present(sorted(all_reduced)):
        x = jax.lax.psum(x, all_reduced)
    return checkpoint_name(x, PRODUCT) if summed else x


def take_shard(subscripts: str, x: jax.Array) -> jax.Array:
    """Shard an activation further, without communication: `take_shard("BS->BT", x)` takes this device's positions."""
    check_subscripts(subscripts)
    dims, to = subscripts.split("->")
    if not manual():
        return jax.reshard(x, act(to))
    for i, (old, new) in enumerate(zip(dims, to, strict=True)):
        if old != new:
            size = x.shape[i] // mesh_size(*act_axes(new))
            x = jax.lax.dynamic_slice_in_dim(x, offset(new, size), size, i)
    return x


def sum_over_stages(x: jax.Array) -> jax.Array:
    """Add up the parts that the ranks of a pipeline have, as of an embedding; without one `x` is complete."""
    return jax.lax.psum(vary(x, {"pp"}), "pp") if _in_pipeline() else x


def equal_on_stages(x: jax.Array) -> jax.Array:
    """Type `x`, which every rank of a pipeline computed, as the same on all of them.

    The transpose gives each rank its share of the cotangent, so that gradients of parameters add up over the ranks.
    """
    return jax.lax.pmean(vary(x, {"pp"}), "pp") if _in_pipeline() else x


def _in_pipeline() -> bool:
    return manual() and mesh_size("pp") > 1


def einsum(
    subscripts: str,
    *operands: Any,
    to: str | None = None,
    partial: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    product: Callable[..., jax.Array] = jnp.einsum,
) -> jax.Array:
    """Compute `jnp.einsum` over the alphabet, the result sharded as its letters say.

    Where the tensor group shards a contracted dim, the partial sums are added on the way to `to` (default: the output's
    letters): `to="BRD"` is a reduce-scatter over sp, `BTD` an all-reduce. With `partial` the result stays unreduced.
    `dtype` is the type of accumulation and result, `product` computes it.

    Raises:
      ValueError: a contracted dim is split over other axes (`contracted_axes`), or a letter is not of the alphabet.
    """
    check_subscripts(subscripts)
    out, summed = subscripts.split("->")[1], contracted_axes(subscripts)
    spec = out_sharding(act(out, unreduced=summed))
    y = product(subscripts, *operands, out_sharding=spec, preferred_element_type=dtype)
    if partial:
        return y
    if summed or to:
        return reshard(f"{out}->{to or out}", y, summed=summed)
    return checkpoint_name(y, PRODUCT)


def name_product(x: jax.Array, name: str) -> jax.Array:
    """Name an activation that the backward pass reads in place of the product it comes from: also as `PRODUCT`.

    A policy that keeps products then keeps this activation, and nothing recomputes it.
    """
    return checkpoint_name(checkpoint_name(x, PRODUCT), name)


def contracted_axes(subscripts: str) -> frozenset[str]:
    """Return the axes over which the product of shards is a partial sum: they shard the contracted dims.

    They must be of the tensor group. A product that contracts B, T or R is a weight's gradient: JAX's transpose of
    `einsum` computes it, unreduced over `rules.gradient_axes`, and `reduce_gradient` adds it up once a step.
    """
    inputs, out = subscripts.split("->")
    contracted = "".join(sorted(set(inputs) - {",", *out}))
    axes = axes_of(contracted)
    if batch_axes := axes - set(TENSOR):
        raise ValueError(
            f"einsum {subscripts!r} contracts {contracted}, which {', '.join(sorted(batch_axes))} split: it adds "
            f"partial sums over {', '.join(TENSOR)} alone; differentiate a product for a weight's gradient, or gather "
            "first"
        )
    return axes


def cast(value: jax.Array, dims: str, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Cast a parameter to the type of compute; vectors (norm scales and biases) and the router stay float32, and a
    matrix that is stored in fp8 as it is."""
    stays = not is_matrix(dims) or "X" in dims or value.dtype == jnp.float8_e4m3fn
    return value if stays else value.astype(dtype)


def gather_param(
    value: jax.Array,
    dims: str,
    act_dims: str,
    dtype: jax.typing.DTypeLike,
    sizes: Mapping[str, int] | None,
) -> jax.Array:
    """Cast a parameter, and all-gather it over the axes (fsdp, cp, ep) that shard it at rest.

    Its cotangent stays unreduced over the axes that shard `act_dims`. A gathered parameter stays as it is.

    Args:
      value: a parameter, gathered or as it is stored.
      dims: its dims.
      act_dims: dims of the activation that it is multiplied with.
      dtype: type of compute.
      sizes: global sizes of the dims that ZeRO shards, by letter (`rules.zero_dim`).
    """
    if not manual():
        # Before the cast, so that the transpose sums in the parameter's own type what `keep_sharded` left to it.
        value = leave_sums(value, dims, act_dims)
        spec = gathered_spec(dims, value.shape, reduced=gradient_axes(dims, act_dims))
        return jax.reshard(row_major(cast(value, dims, dtype)), spec)
    value = vary(cast(value, dims, dtype), _varying_axes(dims, act_dims))
    axes = present(shard_axes(dims))
    if not is_matrix(dims) or not axes:
        return value
    if sizes is None:
        raise UserError(
            "sizes=None: a region that is manual over all axes needs zero_sizes(cfg.model)"
        )
    if value.shape[zero_dim(dims)] == sizes[dims[zero_dim(dims)]]:
        return value
    return jax.lax.all_gather(row_major(value), axes, axis=zero_dim(dims), tiled=True)


def keep_sharded(
    value: jax.Array,
    dims: str,
    act_dims: str,
    dtype: jax.typing.DTypeLike,
    *,
    summed: Set[str] = frozenset(),
) -> jax.Array:
    """Leave a parameter sharded as it is stored, for each layer to gather for itself (ZeRO-3).

    Its cotangent stays unreduced over the other axes that shard `act_dims`. Axes in `summed` are left out: each layer
    sums over them in the parameter's own type. Stacks of layers without `summed` are cast here and not in every layer,
    so their gradients add up in the type of compute; a manual region casts every parameter here.
    """
    if manual():
        return vary(cast(value, dims, dtype), _varying_axes(dims, act_dims))
    if dims.startswith("L") and not summed:
        value = cast(value, dims, dtype)
    axes = gradient_axes(dims, act_dims) - set(SHARD) - summed
    return jax.reshard(value, stored_spec(dims, value.shape, reduced=axes))


def leave_sums(value: jax.Array, dims: str, act_dims: str) -> jax.Array:
    """Type a stored parameter so that its cotangent is a partial sum over the axes that do not shard it.

    The transpose adds up over dp the sums that `keep_sharded` left to each layer. Shards stay as they are.
    """
    if manual():
        return value
    spec = jax.typeof(value).sharding.spec
    replicas = gradient_axes(dims, act_dims) - set(SHARD)
    if replicas <= spec.reduced:
        return value
    return jax.reshard(value, P(*spec.partitions, reduced=spec.reduced | replicas))


def is_gathered_param(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Return whether an equation gathers a parameter over the ZeRO axes, or forwards a gathered one (for remat).

    In an Explicit program the type is `reduced` over fsdp. In a manual region these are all-gathers, and the operations
    without a cost between them and the product.
    """
    if manual():
        if primitive.name == "all_gather":
            return "fsdp" in params["axis_name"]
        return primitive.name in _FORWARDING
    if primitive.name == "reshard":
        return "fsdp" in params["dst_sharding"].spec.reduced
    return any("fsdp" in aval.sharding.spec.reduced for aval in inputs if hasattr(aval, "sharding"))


_FORWARDING = (
    *("pvary", "reduced_vary_cast", "stop_gradient"),
    *("reshape", "broadcast_in_dim", "dynamic_slice"),
)
"""Operations between a parameter's all-gather and its product; repeating them costs nothing."""


def scatter_gradient(grad: jax.Array, dims: str, act_dims: str, value: jax.Array) -> jax.Array:
    """Reduce-scatter a matrix's gradient over (fsdp, cp, ep): each device keeps a shard of the sum (ZeRO-2).

    `value` is the parameter as it is stored. The gradient of a vector, a scattered gradient, and in a manual region one
    of a parameter that no axis shards stay as they are.
    """
    if not is_matrix(dims):
        return grad
    if not manual():
        axes = gradient_axes(dims, act_dims) - set(SHARD)
        return jax.reshard(grad, P(*stored_spec(dims, grad.shape).partitions, unreduced=axes))
    if grad.shape == value.shape:
        return grad
    axes, dim = shard_axes(dims), zero_dim(dims)
    return jax.lax.psum_scatter(row_major(grad), axes, scatter_dimension=dim, tiled=True)


def reduce_gradient(grad: jax.Array, dims: str, act_dims: str, value: jax.Array) -> jax.Array:
    """Reduce the devices' partial sums of a gradient to the sharding of `value`, the stored parameter."""
    if not manual():
        return jax.reshard(grad, jax.typeof(value).sharding.spec)
    grad = scatter_gradient(grad, dims, act_dims, value)
    axes = tuple(sorted(varying(grad) - varying(value)))
    return jax.lax.psum(grad, axes) if axes else grad


def _varying_axes(dims: str, act_dims: str) -> frozenset[str]:
    """Return the axes over which a parameter differs, or is multiplied with different values.

    Its own letters name them, even where it is stored replicated (few kv heads), `act_dims` do, and pp is one.
    """
    pipeline = {"pp"} if mesh_size("pp") > 1 else set()
    return axes_of(dims + act_dims) | pipeline


def shard_shape(x: jax.Array) -> tuple[int, ...]:
    """Return the shape of this device's shard."""
    return x.shape if manual() else jax.typeof(x).sharding.shard_shape(x.shape)


def broadcast_param(weight: jax.Array, dims: str, to: str, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast a vector parameter (`dims`) over an activation with dims `to`; sum its gradient locally only."""
    require(set(dims) <= set(to), "dims", dims, f"must be some of to={to!r}")
    check_letters("to", to)
    weight = jnp.asarray(weight)  # also of a flax parameter
    if manual():
        return jax.lax.broadcast_in_dim(weight, shape, tuple(to.index(dim) for dim in dims))
    return _broadcast(weight, dims, to, shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _broadcast(weight, dims, to, shape):
    spec = act(to)
    weight = jax.reshard(weight, P(*jax.typeof(weight).sharding.spec.partitions))
    return jax.lax.broadcast_in_dim(
        weight, shape, tuple(to.index(dim) for dim in dims), out_sharding=spec
    )


def _broadcast_forward(weight, dims, to, shape):
    return _broadcast(weight, dims, to, shape), None


def _broadcast_backward(dims, to, shape, _, g):
    summed = tuple(i for i, dim in enumerate(to) if dim not in dims)
    return (
        jax.lax.reduce_sum(g, summed, out_sharding=act(dims, unreduced=gradient_axes(dims, to))),
    )


_broadcast.defvjp(_broadcast_forward, _broadcast_backward)


def repeat_kv_heads(weight: jax.Array, dims: str, act_dims: str, num_kv_heads: int) -> jax.Array:
    """Repeat a parameter's kv heads up to one for each member of a larger tensor group.

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
    spec = gathered_spec(dims, weight.shape, reduced=gradient_axes(dims, act_dims))
    return jax.reshard(weight, spec)


def embed_lookup(
    table_VD: jax.Array,
    tokens_BT: jax.Array,
    dtype: jax.typing.DTypeLike,
    sizes: Mapping[str, int],
) -> jax.Array:
    """Look up tokens in the embedding table: the residual stream `[B, R, D]`; in a manual region a partial sum over pp.

    case               a device looks up                                    then
    manual region      all its tokens in its rows of the table, 0 elsewhere  sum over the tensor group
    ZeRO splits D      all tokens of those axes in its columns              all-to-alls split batch and sequence again
    otherwise          its tokens in its columns of the gathered table      all-to-all over sp, all-gather over tp

    In the last two the tensor group splits the columns that are left. Where ZeRO's split stays, the table keeps its own
    type, so that the gradients of a token's row add up in it.

    Args:
      table_VD: the parameter, gathered or as it is stored.
      tokens_BT: token ids, int32.
      dtype: type of compute.
      sizes: as of `gather_param`.
    """
    if manual():
        return _look_up_rows(gather_param(table_VD, "VD", "BT", dtype, sizes), tokens_BT)
    columns = _split_columns(table_VD)
    reduced = gradient_axes("VD", "BT") - set(columns)
    # One move at a time: XLA gives a wrong gradient for a reshard that gathers over one axis and moves another.
    if columns:
        table_VD = jax.reshard(table_VD, P(present(TENSOR), columns, reduced=reduced))
    else:
        table_VD = gather_param(table_VD, "VD", "BT", dtype, sizes)
        if mesh_size("pp") > 1:
            table_VD = jax.reshard(table_VD, P(present(TENSOR), None, reduced=reduced))
    table_VD = jax.reshard(table_VD, P(None, present((*columns, "tp", "sp")), reduced=reduced))
    return _look_up_columns(table_VD, tokens_BT, dtype, columns)


def _look_up_rows(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Look up tokens in this device's rows; return their sum over the tensor group, `[B, R, D]`."""
    rows = table_VD.at[tokens_BT - offset("V", table_VD.shape[0])]
    x_BTD = rows.get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return reshard("BTD->BRD", x_BTD, summed=frozenset(present(TENSOR)))


def _look_up_columns(
    table_VD: jax.Array, tokens_BT: jax.Array, dtype: jax.typing.DTypeLike, columns: tuple[str, ...]
) -> jax.Array:
    """Look up tokens in columns that the axes `columns` and the tensor group shard; return `[B, R, D]`."""
    batch, sequence, residual = (
        tuple(axis for axis in act_axes(dim) if axis not in columns) for dim in "BTR"
    )
    rows = table_VD.at[jax.reshard(tokens_BT, P(batch, sequence))]
    x_BTD = rows.get(out_sharding=P(batch, sequence, present((*columns, "tp", "sp"))), mode="clip")
    x_BRD = jax.reshard(x_BTD.astype(dtype), P(batch, residual, present((*columns, "tp"))))
    x_BRD = jax.reshard(x_BRD, P(batch, residual, columns))
    if "cp" in columns:
        assert columns[-1] == "cp", "cp is the last axis of SHARD"
        x_BRD = jax.reshard(x_BRD, P(batch, act_axes("R"), columns[:-1]))
    return jax.reshard(x_BRD, act("BRD"))


def _split_columns(table_VD: jax.Array) -> tuple[str, ...]:
    """Return the axes over which ZeRO splits the columns of an embedding table, if they may stay split.

    The tensor group splits them further, so the ranks of both together must divide them. The all-to-alls undo the axes
    one after another from the last, which must not leave cp outside of sp in the sequence.
    """
    split = jax.typeof(table_VD).sharding.spec.partitions[1]
    split = split if isinstance(split, tuple) else (split,)
    columns = tuple(axis for axis in SHARD if axis in split and mesh_size(axis) > 1)
    divisible = table_VD.shape[1] % mesh_size(*columns, *TENSOR) == 0
    return columns if divisible and not ("cp" in columns and mesh_size("sp") > 1) else ()
