"""Count the memory of one host that a run takes; no JAX."""

from dataclasses import dataclass

from ultrascale_jax import units
from ultrascale_jax.plan.formulas.checkpoint import Checkpoint
from ultrascale_jax.plan.formulas.memory import host_moments
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.prediction import StepPrediction


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of one host, without the operating system, Python and the loader of data."""

    gpus: int
    """GPUs of the host."""
    activation_bytes: int
    """Activations that its GPUs offload."""
    moment_bytes: int
    """Moments of its GPUs (`optim.offload`)."""
    checkpoint_bytes: int
    """At most so much of a checkpoint waits to be written."""
    memory_bytes: int
    """Memory of the host; 0 where it is not known."""

    @classmethod
    def of(cls, step: StepPrediction, saved: Checkpoint, cluster: Cluster) -> "HostMemory":
        """Count the fullest host of `cluster` for the run of `step`."""
        gpus, moments = min(cluster.gpus_per_host, cluster.num_gpus), host_moments(step.run)
        return cls(
            gpus=gpus,
            activation_bytes=gpus * (step.host_bytes - moments),
            moment_bytes=gpus * moments,
            checkpoint_bytes=min(gpus * saved.gpu_bytes, saved.total_bytes),
            memory_bytes=int(cluster.gpus_per_host * cluster.gpu.host_gib * units.GIB),
        )

    @property
    def total_bytes(self) -> int:
        """Bytes while a checkpoint is written."""
        return self.activation_bytes + self.moment_bytes + self.checkpoint_bytes

    @property
    def text(self) -> str:
        """All of it in a line."""
        parts = {"activations": self.activation_bytes, "moments": self.moment_bytes}
        offloaded = ", ".join(f"{units.size(b)} of {name}" for name, b in parts.items() if b)
        holds = f"{offloaded} and " * bool(offloaded) + units.size(self.checkpoint_bytes)
        memory = f", of {units.size(self.memory_bytes)}" * (self.memory_bytes > 0)
        gpus = f"{units.counted(self.gpus, 'GPU')}"
        return f"a host of {gpus} holds {holds} of a checkpoint that is being written{memory}"
