"""Muon's update (`train_step/muon.py`) by formula: products of the matrices that one GPU has, and their exchanges.

Routers are left out: their matrices are as narrow as the experts are many.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from ultrascale_jax.config.lora import Lora, projections
from ultrascale_jax.config.training import NEWTON_SCHULZ_ITERATIONS
from ultrascale_jax.plan.formulas import costs
from ultrascale_jax.plan.formulas.parameters import stack_rows
from ultrascale_jax.plan.hardware import Cluster, Gpu
from ultrascale_jax.plan.model_shape import adapted_weights
from ultrascale_jax.plan.workload import Run, group, of_sizes

MOVED = 50
"""Bytes read and written for a parameter outside products: cast and norm (6), transposed for its owner and back (8), in
five iterations the product added to X (30), and the update in float32 (6)."""

COPIES = 2
"""Copies of all matrices in bfloat16: as they are sent to their owners or back, and as they are received."""


class Dealt(NamedTuple):
    """Equal matrices of a rank of pp and ep, which the GPUs that share them orthogonalise."""

    number: float
    sizes: tuple[int, int]
    """Width of the model, and the other one."""
    routed: bool
    """Whether they are experts', which ep deals out."""

    @property
    def zero_axes(self) -> tuple[str, ...]:
        """Axes over which ZeRO splits each."""
        return ("fsdp", "cp") if self.routed else ("fsdp", "ep", "cp")

    def replicas(self, run: Run) -> tuple[str, ...]:
        """Return the axes over which they are replicated."""
        return ("dp",) if run.zero else ("dp", *self.zero_axes)

    def owners(self, run: Run) -> int:
        """Return the GPUs that share the matrices."""
        return run.num_gpus // (run.mesh.pp * (run.expert_mesh.ep if self.routed else 1))

    def of_one(self, run: Run) -> int:
        """Return the matrices of one GPU, zeros that fill up included."""
        return math.ceil(self.number / self.owners(run))


@of_sizes
def dealt(run: Run) -> list[Dealt]:
    """Return the matrices of one rank's layers, by weight; a matrix that its GPUs do not divide, by shape."""
    alone, joined = [], dict[tuple, float]()
    for one in _stacks(run):
        if one.number % one.owners(run) == 0:
            alone.append(one)
        else:
            joined[one[1:]] = joined.get(one[1:], 0) + one.number
    return [*alone, *(Dealt(number, *key) for key, number in joined.items())]


def _stacks(run: Run) -> Iterator[Dealt]:
    """Yield the matrices of each weight."""
    mlp, moe = stack_rows(run)
    each = max(mlp + moe, run.rank_layers + run.head_modules)
    for shape, count in run.shape.kinds:
        share = count / run.shape.layers
        rows = {"mlp": mlp, "moe": moe}
        rows |= {"full": each * shape.full_share, "linear": each * shape.linear_share}
        for weight in adapted_weights(shape, Lora(rank=1, targets=projections(shape))):
            sizes, routed = (weight.rows[0], weight.columns[0]), weight.copies > 1
            if weight.columns[1] == "model":
                sizes = sizes[::-1]
            number = share * rows[weight.of] * weight.copies / (run.expert_mesh.ep if routed else 1)
            if number:
                yield Dealt(number, sizes, routed)


def update_seconds(run: Run, cluster: Cluster) -> float:
    """Time the update of one GPU's matrices without its momentum."""
    params = sum(one.of_one(run) * math.prod(one.sizes) for one in dealt(run))
    moved_s = costs.memory_seconds(cluster.gpu, MOVED * params)
    return products_seconds(run, cluster.gpu) + moved_s + exchange_seconds(run, cluster)


def workspace(run: Run) -> float:
    """Count the bytes of one GPU that the exchanges need, many of which XLA has in flight at once."""
    return COPIES * sum(_held_bytes(one, run) for one in dealt(run))


def products_seconds(run: Run, gpu: Gpu) -> float:
    """Time the Newton-Schulz iterations of one GPU: X X^T, its square, and their sum times X."""
    each = (costs.gemm_seconds(gpu, m, n, k, batch=count) for count, m, n, k in _products(run))
    return NEWTON_SCHULZ_ITERATIONS * sum(each)


def flops(run: Run) -> float:
    """Count the operations of these products."""
    return NEWTON_SCHULZ_ITERATIONS * sum(
        2 * count * m * n * k for count, m, n, k in _products(run)
    )


def moved(run: Run) -> float:
    """Count the bytes of their operands and results."""
    sizes = (count * (m * k + k * n + m * n) for count, m, n, k in _products(run))
    return 2 * NEWTON_SCHULZ_ITERATIONS * sum(sizes)


def _products(run: Run) -> Iterator[tuple[int, int, int, int]]:
    """Yield the products of one iteration: how many, and `[m, k] x [k, n]`."""
    for one in dealt(run):
        m, n = sorted(one.sizes)
        for shape in (m, m, n), (m, m, m), (m, n, m):
            yield one.of_one(run), *shape


def exchange_seconds(run: Run, cluster: Cluster) -> float:
    """Time the exchanges of the largest group, to its owners and back, which no other group's products hide."""

    def seconds(one: Dealt) -> float:
        return sum(
            costs.collective_seconds(
                cluster, kind, size, group(run.mesh, axes, cluster.gpus_per_node)
            )
            for kind, axes, size in _exchanges(one, run)
        )

    return max(map(seconds, dealt(run)), default=0.0)


def sent_bytes(run: Run) -> dict[str, float]:
    """Count the bytes that one GPU sends in a step, by axis, ZeRO's by `fsdp`."""
    sent: dict[str, float] = {}
    for one in dealt(run):
        for kind, axes, size in _exchanges(one, run):
            ranks = math.prod(run.mesh.sizes[axis] for axis in axes)
            axis = "fsdp" if set(axes) & {"fsdp", "ep", "cp"} and run.zero else axes[0]
            sent[axis] = sent.get(axis, 0.0) + costs.ring_bytes(kind, size, ranks)
    return sent


def _exchanges(one: Dealt, run: Run) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield the collectives of a group: kind, axes larger than 1, and bytes of the larger side on a GPU."""
    zero_axes = one.zero_axes if run.zero else ()
    mesh = run.expert_mesh if one.routed else run.mesh
    kinds = (
        ("all-to-all", zero_axes, 2),
        ("all-to-all", ("sp", "tp"), 2),
        ("all-gather", one.replicas(run), 1),
    )
    for kind, axes, times in kinds:
        if present := tuple(axis for axis in axes if mesh.sizes[axis] > 1):
            yield from [(kind, present, _held_bytes(one, run))] * times


def _held_bytes(one: Dealt, run: Run) -> float:
    """Count the bytes of a group's matrices on one GPU, before each replica takes its part of them."""
    replicas = math.prod(run.mesh.sizes[axis] for axis in one.replicas(run))
    return 2 * one.of_one(run) * math.prod(one.sizes) * replicas
