"""Muon (arXiv 2502.16982): momentum of the blocks' matrices, orthogonalised; each matrix complete on one device.

Newton-Schulz multiplies a matrix with its transpose, over dims that ZeRO and the tensor group shard. So the matrices of
a stack are dealt to all devices that share them:

    [S, D/d, W/w]     S matrices of this rank of pp and ep, sharded as the momentum
    all-to-all        over the axes of D, then of W
    [S/dw, D, W]      full matrices; each replica (dp) takes an equal part of them
    Newton-Schulz     without communication
    all-gather        over the replicas
    all-to-all        back

Where the devices do not divide S, equal stacks (gate, up and down; queries and output) are dealt as one, and zeros
added. Other stacks stay alone: their exchanges overlap with each other's products. Matrices are sent and multiplied in
the type of compute.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ultrascale_jax.config.training import NEWTON_SCHULZ_ITERATIONS
from ultrascale_jax.kernels.xla import row_major
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.rules import EXPERTS, is_matrix, mesh_size, zero_dim

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Coefficients of an odd polynomial that moves singular values from 0..1 to about 1, however small (Keller Jordan)."""

RMS = 0.2
"""Root mean square of an update over the learning rate, as AdamW's (arXiv 2502.16982, section 2.2)."""

EPS = 1e-30
"""Added to a norm, so that matrices of zeros stay so."""


class MuonState(NamedTuple):
    """State of `scale_by_muon`."""

    mu: Any
    """Running mean of the gradients."""


def is_orthogonalized(dims: str) -> bool:
    """Return whether Muon updates a parameter: a matrix of the blocks. Each expert is one of its own."""
    return dims.startswith("L") and is_matrix(dims)


def scale_by_muon(
    dims: Sequence[str],
    beta: float,
    moment_dtype: jax.typing.DTypeLike,
    compute_dtype: jax.typing.DTypeLike,
) -> optax.GradientTransformation:
    """Return the transformation of stacks `[L, ...]` with these dims, in the order of the leaves."""

    def init(params):
        return MuonState(jax.tree.map(lambda p: jnp.zeros_like(p, dtype=moment_dtype), params))

    def update(grads, state, params=None):
        mean = jax.tree.map(lambda g, m: beta * m + (1 - beta) * g, grads, state.mu)
        nesterov = jax.tree.map(lambda g, m: beta * m + (1 - beta) * g, grads, mean)
        leaves, tree = jax.tree.flatten(nesterov)
        updates = orthogonalize(leaves, dims, compute_dtype)
        mu = jax.tree.map(lambda m: m.astype(moment_dtype), mean)
        return jax.tree.unflatten(tree, updates), MuonState(mu)

    return optax.GradientTransformation(init, update)  # pyrefly: ignore


@dataclasses.dataclass(frozen=True)
class _Layout:
    """A stack of matrices as `[S, D, W]`, and the axes that split each."""

    order: tuple[int, ...]
    """Dims of the stack: the numbers of its matrices, the one that ZeRO shards, the others."""
    numbering: int
    """How many dims number its matrices."""
    number: int
    """S, of the full stack."""
    sizes: tuple[int, int]
    """D and W, of full matrices."""
    axes: tuple[tuple[str, ...], ...]
    """Axes that split S, D and W."""

    @classmethod
    def of(cls, stack: jax.Array, dims: str) -> "_Layout":
        numbering = tuple(i for i, dim in enumerate(dims) if dim in f"L{EXPERTS}")
        model = zero_dim(dims)
        width = tuple(i for i in range(stack.ndim) if i not in (*numbering, model))
        parts = [*map(_axes, jax.typeof(stack).sharding.spec.partitions)]
        parts += [()] * (stack.ndim - len(parts))
        assert not any(parts[i] for i in width[1:]), f"{dims}: gathered dims are not consecutive"
        groups = numbering, (model,), width
        axes = tuple(tuple(axis for i in group for axis in parts[i]) for group in groups)
        sizes = stack.shape[model], math.prod(stack.shape[i] for i in width)
        number = math.prod(stack.shape[i] for i in numbering)
        return cls((*numbering, model, *width), len(numbering), number, sizes, axes)

    @property
    def replicas(self) -> tuple[str, ...]:
        """Axes over which the stack is replicated."""
        names = jax.sharding.get_abstract_mesh().axis_names
        shared = {axis for axes in self.axes for axis in axes}
        return tuple(axis for axis in names if mesh_size(axis) > 1 and axis not in shared)

    @property
    def owners(self) -> int:
        """Number of devices that share the matrices of one rank of pp and ep."""
        _, model, width = self.axes
        return mesh_size(*model, *width, *self.replicas)

    def matrices(self, stack: jax.Array) -> jax.Array:
        """View this device's part of the stack as `[S, D/d, W/w]`."""
        turned = stack.transpose(self.order)
        numbering, (model, *_) = turned.shape[: self.numbering], turned.shape[self.numbering :]
        return turned.reshape(math.prod(numbering), model, -1)

    def stack(self, matrices: jax.Array, like: jax.Array) -> jax.Array:
        """Return the part of the stack, shaped as `like`; the inverse of `matrices`."""
        turned = matrices.reshape([like.shape[i] for i in self.order])
        return turned.transpose([self.order.index(i) for i in range(like.ndim)])


def _axes(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (part,) if isinstance(part, str) else part or ()


def orthogonalize(
    stacks: Sequence[jax.Array], dims: Sequence[str], dtype: jax.typing.DTypeLike
) -> list[jax.Array]:
    """Return `newton_schulz` of each matrix of stacks `[L, ...]` with these dims, computed in `dtype`, in float32.

    The results have the root mean square of `RMS` and the shardings of the stacks.
    """
    layouts = [_Layout.of(stack, of) for stack, of in zip(stacks, dims, strict=True)]
    groups: dict[tuple, list[int]] = {}
    for i, layout in enumerate(layouts):
        number = layout.number // mesh_size(*layout.axes[0])
        alone = (i,) if number % layout.owners == 0 else ()
        groups.setdefault((layout.sizes, layout.axes, *alone), []).append(i)
    results = [*stacks]
    for members in groups.values():
        same = [stacks[i] for i in members]
        shardings = tuple(jax.typeof(stack).sharding.spec for stack in same)
        run = functools.partial(_dealt, [layouts[i] for i in members], dtype)
        updates = smap(run, in_specs=shardings, out_specs=shardings)(*same)
        for i, update in zip(members, updates, strict=True):
            results[i] = RMS * max(layouts[i].sizes) ** 0.5 * update.astype(jnp.float32)
    return results


def _dealt(
    layouts: list[_Layout], dtype: jax.typing.DTypeLike, *stacks: jax.Array
) -> tuple[jax.Array, ...]:
    """Orthogonalise the matrices of stacks that have one shape and one sharding, each on one device."""
    layout, replicas = layouts[0], layouts[0].replicas
    parts = [
        row_major(one.matrices(stack.astype(dtype)))
        for one, stack in zip(layouts, stacks, strict=True)
    ]
    x_SDW = jnp.concatenate(parts)
    _, *axes = layout.axes
    x_SDW = jnp.pad(x_SDW, ((0, -len(x_SDW) % layout.owners), (0, 0), (0, 0)))
    for dim, names in enumerate(axes, 1):
        x_SDW = _deal(x_SDW, names, dim)
    if replicas:
        share = len(x_SDW) // mesh_size(*replicas)
        first = share * jax.lax.axis_index(replicas)
        x_SDW = jax.lax.dynamic_slice_in_dim(x_SDW, first, share)
    x_SDW = newton_schulz(x_SDW)
    if replicas:
        x_SDW = jax.lax.all_gather(x_SDW, replicas, tiled=True, to="invarying")
    for dim, names in reversed([*enumerate(axes, 1)]):
        x_SDW = _collect(x_SDW, names, dim)
    updates, start = [], 0
    for one, part, stack in zip(layouts, parts, stacks, strict=True):
        updates.append(one.stack(x_SDW[start : start + len(part)], stack))
        start += len(part)
    return tuple(updates)


def _deal(x_SDW: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Give each rank of `axes`, which split `dim`, an equal part of the matrices, joined along it."""
    ranks = mesh_size(*axes)
    if ranks == 1:
        return x_SDW
    received = jax.lax.all_to_all(x_SDW, axes, split_axis=0, concat_axis=0, tiled=True)
    parts = received.reshape(ranks, -1, *x_SDW.shape[1:])
    shape = [len(x_SDW) // ranks, *x_SDW.shape[1:]]
    shape[dim] *= ranks
    return jnp.moveaxis(parts, 0, dim).reshape(shape)


def _collect(x_SDW: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Return the shards of all matrices from full ones; the inverse of `_deal`."""
    ranks = mesh_size(*axes)
    if ranks == 1:
        return x_SDW
    shape = [*x_SDW.shape]
    shape[dim : dim + 1] = ranks, shape[dim] // ranks
    parts = jnp.moveaxis(x_SDW.reshape(shape), dim, 0)
    sent = parts.reshape(-1, *parts.shape[2:])
    return jax.lax.all_to_all(sent, axes, split_axis=0, concat_axis=0, tiled=True)


def newton_schulz(x_SMN: jax.Array) -> jax.Array:
    """Move the singular values of matrices `[S, M, N]` to about 1, in their type (0.7 to 1.2 of those above 1e-3)."""
    norm_S11 = jnp.linalg.norm(x_SMN.astype(jnp.float32), axis=(1, 2), keepdims=True)
    x = (x_SMN / (norm_S11 + EPS)).astype(x_SMN.dtype)
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.mT
        x = linear * x + (cubic * gram + quintic * (gram @ gram)) @ x
    return x.mT if is_tall else x
