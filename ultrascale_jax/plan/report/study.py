"""One model on one cluster, and what can be varied of it."""

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ultrascale_jax.config import Config, MeshConfig, UserError
from ultrascale_jax.plan.formulas.memory import breakdown
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.search.search_space import with_changes
from ultrascale_jax.plan.workload import GIB, ModelShape, Run

SPLITS = {
    "sp": "tensor and sequence (sp)",
    "tp": "tensor (tp)",
    "cp": "context (cp)",
    "pp": "pipeline (pp)",
}
"""Axes that split the model or the sequence, and what they are called in figures."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One model on one cluster, to be varied."""

    name: str
    """Of the recipe."""
    cfg: Config
    cluster: Cluster
    shape: ModelShape
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Run` that `cfg` cannot say."""

    @property
    def run(self) -> Run:
        """The configuration as it is.

        Raises:
          UserError: the mesh does not divide the model, the batch or the GPUs.
        """
        return Run.of(self.cfg, self.cluster.num_gpus, self.shape, **self.changes)

    @property
    def limit(self) -> dict[str, Any]:
        """The line of the GPU's memory in a figure."""
        gpu = self.cluster.gpu
        return {
            "limit": gpu.usable_bytes / GIB,
            "limit_name": f"usable on {gpu.name}: {gpu.usable_bytes / GIB:.0f} GiB",
        }

    def varied(self, mesh: dict[str, int], sequences: int = 1, **train: Any) -> Run | None:
        """The run with another mesh, `sequences` a micro-batch and other fields of `train`; none if it is illegal.

        The global batch stays, or grows to one micro-batch for each stage on each batch shard.
        """
        sizes = MeshConfig(**({"fsdp": 1} | mesh))
        least = sizes.batch * sequences
        rounds = max(self.cfg.train.global_batch // least, sizes.pp)
        told = with_changes(
            self.cfg, mesh=sizes, microbatches=rounds, global_batch=rounds * least, **train
        )
        count = sizes.batch * sizes.cp * sizes.tensor * sizes.pp
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of tensor groups larger than a node, which are shown to be slow
            try:
                return Run.of(told, count, self.shape, **self.changes)
            except UserError:
                return None

    def fits(self, run: Run) -> bool:
        """Whether one GPU's memory is enough by formula."""
        return breakdown(run).peak_bytes <= self.cluster.gpu.usable_bytes

    def sized(self, run: Run) -> Cluster:
        """The cluster with as many GPUs as `run` has."""
        return dataclasses.replace(self.cluster, num_gpus=run.num_gpus)


def powers(most: int) -> list[int]:
    """1, 2, 4 ... up to `most`."""
    return [2**n for n in range(most.bit_length())]
