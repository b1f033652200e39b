"""Compare published runs of other trainers with the estimate for this one; no constant was fitted to them.

A row of docs/planning/published_runs.csv or held_out_runs.csv names its model by sizes, or by its name in
`configs/shapes.py` and sizes that differ, and its machine by `find_cluster`, so any run can be added to the files.
`experts` are their number, a token's experts, their width, shared ones, and layers without experts; `lora` has rank and
targets.
"""

import csv
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale_jax.cli.command_line import parse_remat
from ultrascale_jax.config import Experts, Lora, MeshConfig, MoEConfig
from ultrascale_jax.configs import shapes
from ultrascale_jax.plan.formulas.step_time import estimate
from ultrascale_jax.plan.hardware import Cluster, find_cluster
from ultrascale_jax.plan.model_shape import ModelShape
from ultrascale_jax.plan.workload import Run, group

SIZES = ("d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published run."""

    software: str
    run: Run
    cluster: Cluster
    tokens_per_s_gpu: float
    model: str
    earlier_prediction: float
    """Tokens/s/GPU as predicted by the rates up to commit 43a1048a, to which no such run had been fitted."""

    @property
    def ratios(self) -> tuple[float, float]:
        """Return the throughput that the formulas predict over the published one, by those rates and by today's."""
        now = estimate(self.run, self.cluster).tokens_per_s_gpu
        return self.earlier_prediction / self.tokens_per_s_gpu, now / self.tokens_per_s_gpu


def read(path: Path) -> list[Published]:
    """Read the runs of a file."""
    with path.open(newline="") as file:
        return [_published(line) for line in csv.DictReader(file)]


def _published(line: Mapping[str, Any]) -> Published:
    mesh = MeshConfig.parse(line["mesh"]).resolve(int(line["gpus"]))
    run = Run(
        shape=_shape(line),
        mesh=mesh,
        seq_len=int(line["seq_len"]),
        sequences=int(line["mbs"]),
        microbatches=int(line["gas"]),
        zero=int(line["zero"]),  # pyrefly: ignore
        remat=parse_remat(line["remat"]),
        precision=line["precision"],
        schedule=line["schedule"] or "1f1b",
        virtual_stages=int(line["virtual_stages"]),
        lora=_lora(line.get("lora")),
    )
    cluster = find_cluster(line["cluster"] or None, line["gpu"] or None, run.num_gpus)
    experts = run.shape.experts
    # Megatron does not split an expert where the tensor group and EP divide the experts.
    folding = experts is not None and MoEConfig.can_fold(experts, mesh)
    nodes = group(mesh, ("ep", "sp") if folding else ("ep",), cluster.gpus_per_node).nodes
    return Published(
        software=line["software"],
        run=dataclasses.replace(run, moe=MoEConfig(a2a_groups=nodes, folding=folding)),
        cluster=cluster,
        tokens_per_s_gpu=float(line["tok_s_gpu"]),
        model=line["model"],
        earlier_prediction=float(line["before"]),
    )


def _lora(words: str | None) -> Lora:
    """Return the adapters that `words` name by rank and targets."""
    rank, *targets = (words or "0").split()
    return Lora(rank=int(rank), targets=tuple(targets))  # pyrefly: ignore


def _shape(line: Mapping[str, Any]) -> ModelShape:
    """Return the model that `shape` names with the sizes that differ, or a dense one of the sizes."""
    sizes: dict[str, Any] = {name: int(line[name]) for name in SIZES if line[name]}
    if line.get("experts"):
        num, top_k, d_ff, shared, dense = map(int, line["experts"].split())
        sizes["experts"] = Experts(
            num=num, top_k=top_k, d_ff=d_ff, shared=shared, dense_layers=dense
        )
    if line["shape"]:
        return ModelShape.of(dataclasses.replace(getattr(shapes, line["shape"]), **sizes))
    if line["gated"] == "0":
        # The planner counts three matrices of a feed-forward layer: as many parameters as two that are 3/2 as wide.
        sizes["d_ff"] = 64 * round(sizes["d_ff"] * 2 / 3 / 64)
    return ModelShape(**sizes)
