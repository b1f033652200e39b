"""The alphabet: one letter per dim decides over which mesh axes it is split.

    B batch   T positions   R positions of the residual stream   S key/value positions   D model   F ffn
    N query heads   K kv heads   G queries per kv head   H head dim   V vocab   E experts   L layers

    activations:  B:(dp,fsdp,ep)  T:cp  R:(cp,sp)  F,N,K,V:(sp,tp)  E:ep
    parameters:   D:(fsdp,cp,ep)  F,N,K,V:(sp,tp)  E:ep  L:pp

Two words of JAX's explicit sharding do the work of Megatron's conjugate pairs and of DDP's hooks. A value that is
`unreduced` over an axis holds a partial sum on each of its devices; one that is `reduced` over an axis is replicated
there and has an unreduced cotangent. So a parameter gathered as `reduced` over the batch axes collects its gradient
locally, and the reduction happens once, where the gradient is resharded.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

BATCH = ("dp", "fsdp", "ep")
TENSOR = ("sp", "tp")
SHARD = ("fsdp", "cp", "ep")
"""Axes over which ZeRO shards parameters, gradients and optimizer state."""

ACTIVATION = {
    "B": BATCH,
    "T": ("cp",),
    "R": ("cp", "sp"),
    "F": TENSOR,
    "N": TENSOR,
    "K": TENSOR,
    "V": TENSOR,
    "E": ("ep",),
}
PARAMETER = {"F": TENSOR, "N": TENSOR, "K": TENSOR, "V": TENSOR, "E": ("ep",), "L": ("pp",)}


def axes_of(dims: str) -> frozenset[str]:
    """The mesh axes over which an activation with these dims is split."""
    return frozenset(axis for dim in dims for axis in ACTIVATION.get(dim, ()))


def act(
    dims: str, *, reduced: frozenset[str] = frozenset(), unreduced: frozenset[str] = frozenset()
) -> P:
    """Sharding of an activation: `act("BTF")` is `P((dp, fsdp, ep), cp, (sp, tp))`."""
    return P(*(ACTIVATION.get(dim) for dim in dims), reduced=reduced, unreduced=unreduced)


def is_matrix(dims: str) -> bool:
    """Whether a parameter is a matrix: it maps the model dim to others or back."""
    return "D" in dims and dims.strip("L") != "D"


def gathered(dims: str, shape: tuple[int, ...], *, reduced: frozenset[str] = frozenset()) -> P:
    """Sharding in which a parameter is used: split over the tensor group, whole over (fsdp, cp, ep).

    A dim that the tensor group does not divide (few kv heads) is replicated.
    """
    return P(*(_split(dim, size) for dim, size in zip(dims, shape, strict=True)), reduced=reduced)


def stored(
    dims: str, shape: tuple[int, ...], *, zero: int = 3, reduced: frozenset[str] = frozenset()
) -> P:
    """Sharding in which a parameter, its gradient and its moments rest between steps.

    With `zero >= 1` the D of matrices is split over (fsdp, cp, ep), if they divide it (`Config.check` asks for it).
    Vectors stay whole: gathering them would cost a collective each and save nothing.
    """
    spec = list(gathered(dims, shape).partitions)
    if zero and is_matrix(dims) and shape[dims.index("D")] % mesh_size(*SHARD) == 0:
        spec[dims.index("D")] = SHARD
    return P(*spec, reduced=reduced)


def _split(dim: str, size: int) -> tuple[str, ...] | None:
    axes = PARAMETER.get(dim)
    if axes is None or size % mesh_size(*axes):
        return None
    if dim == "L" and mesh_size(*axes) == 1:
        return None  # a scan over layers wants its leading dim whole, even over an axis of size 1
    return axes


def mesh_size(*axes: str) -> int:
    """Product of the sizes of these axes in the current mesh; 1 outside any mesh."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes.get(axis, 1) for axis in axes)


def einsum(
    subscripts: str,
    *operands: jax.Array,
    to: str | None = None,
    partial: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """`jnp.einsum` over the alphabet, the result sharded as its letters say.

    When a contracted dim is split over the tensor group the partial sums are added on the way to `to` (default: the
    output's own letters): `to="BRD"` makes that a reduce-scatter over sp, `BTD` an all-reduce. With `partial` they are
    left as they are, unreduced. `dtype` is the type of accumulation and result.
    """
    inputs, out = subscripts.split("->")
    summed = axes_of("".join(set(inputs.replace(",", "")) - set(out))) & frozenset(TENSOR)
    y = jnp.einsum(
        subscripts, *operands, out_sharding=act(out, unreduced=summed), preferred_element_type=dtype
    )
    return jax.reshard(y, act(to or out)) if (summed or to) and not partial else y
