"""Count the memory of one host that a run takes; no JAX."""

from dataclasses import dataclass

from ultrascale_jax import units
from ultrascale_jax.plan.formulas.checkpoint import Checkpoint
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.prediction import StepPrediction


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of one host, beside the operating system, Python and the loader of data."""

    gpus: int
    """GPUs of the host."""
    activation_bytes: int
    """Activations that its GPUs offload."""
    checkpoint_bytes: int
    """At most so much of a checkpoint waits to be written."""
    memory_bytes: int
    """Memory of the host; 0 where it is not known."""

    @classmethod
    def of(cls, step: StepPrediction, saved: Checkpoint, cluster: Cluster) -> "HostMemory":
        """Count the fullest host of `cluster` for the run of `step`."""
        gpus = min(cluster.gpus_per_host, cluster.num_gpus)
        return cls(
            gpus=gpus,
            activation_bytes=gpus * step.host_bytes,
            checkpoint_bytes=min(gpus * saved.gpu_bytes, saved.total_bytes),
            memory_bytes=int(cluster.gpus_per_host * cluster.gpu.host_gib * units.GIB),
        )

    @property
    def total_bytes(self) -> int:
        """Bytes while a checkpoint is written."""
        return self.activation_bytes + self.checkpoint_bytes

    @property
    def text(self) -> str:
        """All of it in a line."""
        offloaded = f"{units.size(self.activation_bytes)} of activations and "
        holds = offloaded * (self.activation_bytes > 0) + units.size(self.checkpoint_bytes)
        memory = f", of {units.size(self.memory_bytes)}" * (self.memory_bytes > 0)
        gpus = f"{self.gpus} GPU{'s' * (self.gpus > 1)}"
        return f"a host of {gpus} holds {holds} of a checkpoint that is being written{memory}"
