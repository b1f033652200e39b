"""Count the bytes of a checkpoint and the seconds of a save; no JAX.

A checkpoint holds the parameters that are trained and the optimizer's moments (`checkpoint/manager.py`). A save
copies them to the host's memory, for which training waits, and then writes them while training continues.
"""

from dataclasses import dataclass

from ultrascale_jax import units
from ultrascale_jax.plan.formulas import costs
from ultrascale_jax.plan.formulas.memory import moments, state
from ultrascale_jax.plan.formulas.parameters import (
    resting_bytes,
    sharded_params,
    trained_params,
    weights_of,
)
from ultrascale_jax.plan.hardware import Gpu
from ultrascale_jax.plan.workload import Run


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The size of a checkpoint, and the seconds of a save."""

    total_bytes: int
    """Bytes on the disk, without metadata and before compression."""
    gpu_bytes: int
    """Bytes that one GPU copies to its host at most, where they stay until they are written."""
    restore_bytes: int
    """Bytes that a restart takes on one GPU: it restores the state in place, without a fresh one."""
    copy_s: float
    """Seconds for which training waits at least."""
    write_s: float | None
    """Seconds until it is complete, while training continues; none where the storage's rate is not known."""

    @property
    def text(self) -> str:
        """All of it in a line."""
        written = (
            f", which takes {units.rounded(self.write_s)} s" if self.write_s is not None else ""
        )
        return (
            f"a checkpoint has {units.size(self.total_bytes)}; training waits {units.rounded(self.copy_s)} s until "
            f"a GPU has copied at most {units.size(self.gpu_bytes)} to its host, and continues while it is "
            f"written{written}; a restart takes {units.size(self.restore_bytes)} of a GPU"
        )


def checkpoint(run: Run, gpu: Gpu, storage_gbs: float | None = None) -> Checkpoint:
    """Predict a save of `run`; `storage_gbs` is the rate of all hosts together, in 1e9 bytes a second."""
    weights, shape = weights_of(run), run.shape
    norms = 0 if run.adapter_params else weights.vectors
    every, part = run.adapter_params or shape.num_params, trained_params(run, weights) + norms
    copied = moments(run, weights)
    matrices = shape.num_params - shape.embedding_params - shape.vector_params
    stacked = run.adapter_params or matrices
    total = run.moment_bytes * (every - stacked) + run.matrix_moment_bytes * stacked
    total += resting_bytes(run, every, matrices)
    copied += resting_bytes(run, part, sharded_params(run, weights, tables=False))
    return Checkpoint(
        total_bytes=int(total),
        gpu_bytes=int(copied),
        restore_bytes=int(sum(state(run, weights).values())),
        copy_s=costs.host_seconds(gpu, copied),
        write_s=None if storage_gbs is None else total / (1e9 * storage_gbs),
    )
