"""The alphabet: one letter per dim decides over which mesh axes it is split.

    B batch   T positions   R positions of the residual stream   S key/value positions   D model   F ffn
    N query heads   K kv heads   G queries per kv head   H head dim   V vocab   E experts   L layers
    X experts as the router sees them   C rows of an expert   Z statistics
    of latent attention: Q latent of queries   J latent of keys and values   A = J and the rotary key
    W value width   I = a head's key without positions and its value   U rank of an adapter (LoRA)
    P = a pair of D, side by side (multi-token prediction)   O taps of a short convolution
    Y experts that are whole on a rank of sp too, each W wide (`moe.folding`)
    of linear attention: N heads of values   K heads of queries and keys   H and W their widths

    activations:  B:(dp,fsdp,ep)  T:cp  R:(cp,sp)  F,N,K:(sp,tp)  V:(pp,sp,tp)  E:ep  Y:(ep,sp)
    parameters:   D:(fsdp,ep,cp)  F,N,K:(sp,tp)  V:(pp,sp,tp)  E:ep  Y:(ep,sp)  L:pp

ZeRO splits the first of D, Q, J and U that a matrix has; where E or Y is split over ep already, over (fsdp, cp) alone.

Two terms of JAX's explicit sharding do the work of Megatron's conjugate pairs and of DDP's hooks. A value that is
`unreduced` over an axis holds a partial sum on each of its devices; one that is `reduced` over an axis is replicated
there and has an unreduced cotangent. So a parameter gathered as `reduced` over the batch axes collects its gradient
locally, and the reduction happens once, where the gradient is resharded.

A mesh may lack some of the axes: nothing is split over these. Inside a region that is manual over all axes
(`sharding/manual.py`), and without a mesh, the same text works on this device's shards: specs come out empty, and the
operations of `sharding/primitives.py` communicate by `jax.lax` collectives. Both kinds of value, `reduced` and
`unreduced`, are *varying* there: a cotangent of a varying value stays local, and is summed where the text says so.
"""

import math
from collections.abc import Iterable

import jax
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import require

LETTERS = frozenset("BTRSDFNKGHVELXCZQJAWIUPMOY")
"""The letters above, and M, micro-batches."""

EXPERTS = "EY"
"""Dims that number experts; a parameter has them first."""

WHOLE = "_"
"""A dim that no axis splits, and that has no letter."""

BATCH = ("dp", "fsdp", "ep")
TENSOR = ("sp", "tp")
VOCABULARY = ("pp", "sp", "tp")
SHARD = ("fsdp", "ep", "cp")
"""Axes over which ZeRO shards parameters, gradients and optimizer state, in the mesh's order.

In another order XLA does not know the reduce-scatter of a gradient: it all-reduces, and sends twice as much.
"""

ACTIVATION: dict[str, tuple[str, ...]] = {
    "B": BATCH,
    "T": ("cp",),
    "R": ("cp", "sp"),
    "F": TENSOR,
    "N": TENSOR,
    "K": TENSOR,
    "V": VOCABULARY,
    "E": ("ep",),
    "Y": ("ep", "sp"),
}
PARAMETER: dict[str, tuple[str, ...]] = {
    "F": TENSOR,
    "N": TENSOR,
    "K": TENSOR,
    "V": VOCABULARY,
    "E": ("ep",),
    "Y": ("ep", "sp"),
    "L": ("pp",),
}


def check_letters(argument: str, dims: str, *, also: str = "") -> None:
    """Refuse letters that are not of the alphabet: an unknown one would be split over no axis in silence."""
    unknown = "".join(sorted(set(dims) - LETTERS - set(also)))
    fix = f"{unknown} is none of the letters {''.join(sorted(LETTERS))} (sharding/rules.py, docs/layers.md)"
    require(not unknown, argument, dims, fix)


def check_subscripts(subscripts: str) -> None:
    """Refuse subscripts without an arrow, or with letters that are not of the alphabet."""
    fix = "has no arrow; write the dims of arguments and result, as BTD,DF->BTF or BRD->BTD"
    require(subscripts.count("->") == 1, "subscripts", subscripts, fix)
    check_letters("subscripts", subscripts, also=",->")


def check_axes(axes: object) -> None:
    """Refuse one axis as text, whose letters would be taken for axes that are not there."""
    require(not isinstance(axes, str), "axes", axes, f"must be names of axes: {{{axes!r}}}")


def manual() -> bool:
    """Return whether values are this device's shards: in a region that is manual over all axes, or without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return set(mesh.manual_axes) == set(mesh.axis_names)


def axes_of(dims: str) -> frozenset[str]:
    """Return the mesh axes over which an activation with these dims is split."""
    return frozenset(present(axis for dim in dims for axis in act_axes(dim)))


def gradient_axes(dims: str, act_dims: str) -> frozenset[str]:
    """Return the axes over which a parameter's gradient is a sum.

    They split `act_dims`, the dims of the activation that it is multiplied with, and not its own `dims`.
    """
    return axes_of(act_dims) - axes_of(dims)


def act_axes(dim: str) -> tuple[str, ...]:
    """Return the mesh axes that split one dim of an activation, slowest first."""
    return _axes(ACTIVATION, dim)


def _axes(table: dict[str, tuple[str, ...]], dim: str) -> tuple[str, ...]:
    """Return the axes that split `dim`; pp only in a pipeline: a scan over layers needs an unsharded dim."""
    if dim not in LETTERS and dim != WHOLE:
        check_letters("dims", dim)
    return _possible(axis for axis in table.get(dim, ()) if axis != "pp" or mesh_size("pp") > 1)


def _possible(axes: Iterable[str]) -> tuple[str, ...]:
    """Return the axes that a spec may name: all of the mesh, or all that there are without one."""
    return tuple(axes) if jax.sharding.get_abstract_mesh().empty else present(axes)


def present(axes: Iterable[str]) -> tuple[str, ...]:
    """Return which of these axes the mesh has; none without a mesh."""
    names = jax.sharding.get_abstract_mesh().axis_names
    return tuple(axis for axis in axes if axis in names)


def _spec(parts, reduced=frozenset(), unreduced=frozenset()) -> P:
    """Return a spec without the axes that are manual already."""
    done = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    parts = (tuple(axis for axis in part if axis not in done) or None for part in parts)
    return P(*parts, reduced=reduced - done, unreduced=unreduced - done)


def act(
    dims: str, *, reduced: frozenset[str] = frozenset(), unreduced: frozenset[str] = frozenset()
) -> P:
    """Return the sharding of an activation: `act("BTF")` is `P((dp, fsdp, ep), cp, (sp, tp))`."""
    return _spec((act_axes(dim) for dim in dims), reduced, unreduced)


def out_sharding(spec: P) -> P | None:
    """Return a spec as JAX's functions take it for their results: None without a mesh."""
    return None if jax.sharding.get_abstract_mesh().empty else spec


def place[T](x: T, spec: P) -> T:
    """Reshard a tree of arrays; without a mesh it stays as it is."""
    return x if jax.sharding.get_abstract_mesh().empty else jax.reshard(x, spec)


def zero_dim(dims: str) -> int:
    """Return the dim of a matrix that ZeRO splits: the model's, else that of a latent or an adapter."""
    return next(dims.index(dim) for dim in "DQJU" if dim in dims)


def is_matrix(dims: str) -> bool:
    """Return whether a parameter is a matrix: it maps the model dim, a latent's or an adapter's, to others.

    A dim X that comes first only numbers vectors: biases of experts.
    """
    unstacked = dims.removeprefix("L")
    is_vector = len(unstacked) == 1 or unstacked.startswith("X")
    return bool(set("DQJU") & set(unstacked)) and not is_vector


def is_of_experts(dims: str) -> bool:
    """Return whether a parameter is one of each routed expert."""
    return not {*EXPERTS}.isdisjoint(dims)


def shard_axes(dims: str) -> tuple[str, ...]:
    """Return the axes over which ZeRO shards a matrix: all of `SHARD` that shard none of its dims already."""
    taken = {axis for dim in dims for axis in PARAMETER.get(dim, ())}
    return _possible(axis for axis in SHARD if axis not in taken)


def gathered_spec(dims: str, shape: tuple[int, ...], *, reduced: frozenset[str] = frozenset()) -> P:
    """Return the sharding in which a parameter is used: sharded over the tensor group, gathered over (fsdp, cp, ep).

    A dim that the tensor group does not divide (few kv heads) is replicated.
    """
    return _spec(_partitions(dims, shape), reduced)


def stored_spec(
    dims: str, shape: tuple[int, ...], *, zero: int = 3, reduced: frozenset[str] = frozenset()
) -> P:
    """Return the sharding of a parameter, its gradient and its moments between steps.

    With `zero >= 1` the D of matrices is split over (fsdp, cp, ep), that of experts over (fsdp, cp), if they divide it:
    `Config.check` and `check_shards` require that. Vectors are replicated, as gathering them would cost a collective
    each and save nothing; so is the side of an adapter that has only its rank to shard, if they do not divide that.
    """
    parts = _partitions(dims, shape)
    if zero and is_matrix(dims) and shape[zero_dim(dims)] % mesh_size(*shard_axes(dims)) == 0:
        parts[zero_dim(dims)] = shard_axes(dims)
    return _spec(parts, reduced)


def check_shards(dims: str, shape: tuple[int, ...]) -> None:
    """Refuse a matrix that ZeRO would replicate on every device, but for an adapter's rank."""
    if not is_matrix(dims) or dims[zero_dim(dims)] == "U":
        return
    axes, dim = shard_axes(dims), zero_dim(dims)
    fix = (
        f"{dims[dim]} of a matrix {dims} is {shape[dim]}, and must be divisible by "
        f"mesh.{'*mesh.'.join(axes)}={mesh_size(*axes)}, or every device would store all of it; use mesh.dp too"
    )
    require(shape[dim] % mesh_size(*axes) == 0, "shape", shape, fix)


def _partitions(dims: str, shape: tuple[int, ...]) -> list[tuple[str, ...]]:
    axes = [_axes(PARAMETER, dim) for dim in dims]
    return [a if size % mesh_size(*a) == 0 else () for a, size in zip(axes, shape, strict=True)]


def mesh_size(*axes: str) -> int:
    """Return the product of the sizes of these axes in the current mesh; 1 outside any mesh."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes.get(axis, 1) for axis in axes)


def specs[T](tree: T) -> T:
    """Return the shardings of a tree's arrays, as their types say."""
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)


def varying(x: jax.Array) -> frozenset[str]:
    """Return the manual axes over which `x` may differ, as its type says."""
    return frozenset(jax.typeof(x).mat.varying)


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Type `x` as varying over these axes, as far as they are manual: its cotangent stays a partial sum over them."""
    check_axes(axes)
    manual_axes = jax.sharding.get_abstract_mesh().manual_axes
    missing = tuple(sorted(set(axes) & set(manual_axes) - varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x
