"""Say whether anything fits, without a search: on each mesh only the leanest candidates are counted.

They recompute each layer, with its inputs on the device or on the host, and the first that fits ends the question.
"""

import math
from collections.abc import Iterator

from ultrascale_jax.config import AXES, Config, MeshConfig
from ultrascale_jax.plan.formulas.memory import breakdown, fits_host
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.model_shape import ModelShape, adapter_params
from ultrascale_jax.plan.search.search_space import (
    INPUTS,
    Choices,
    divisors,
    enumerate_runs,
    is_tried,
    meshes,
    mostly_padded,
)
from ultrascale_jax.plan.verdict import (
    DOES_NOT_FIT,
    FITS,
    POSSIBLE,
    UNSURE,
    Verdict,
    by_formula,
)
from ultrascale_jax.plan.workload import Run, host_moment_bytes, matrix_moment_bytes, weight_bytes

LEANEST: Choices = {
    "remat": ("full", INPUTS),
    "stash": ("input",),
    "schedule": ("1f1b", "interleaved", "afab"),
    "zero": (0, 2, 3),
}
"""Values with which a mesh needs the least memory, where they are free; ZeRO-0 is for meshes that shard nothing.

With few micro-batches afab may need the least: no tick has forward and backward passes.
"""


def leanest_verdict(cfg: Config, cluster: Cluster, choices: Choices) -> Verdict:
    """Say whether anything within `choices` fits `cluster`."""
    best: Verdict = DOES_NOT_FIT
    for mesh in _lean_meshes(cfg, cluster, choices):
        for run in _leanest(cfg, cluster, choices, mesh):
            if not fits_host(run, cluster.gpu):
                continue
            verdict = by_formula(breakdown(run).peak_bytes, cluster.gpu.usable_bytes)
            if verdict == FITS:
                return FITS
            best = UNSURE if verdict == UNSURE else best
    return best


def _lean_meshes(cfg: Config, cluster: Cluster, choices: Choices) -> list[MeshConfig]:
    """List the meshes of which one fits if any does, from the simplest.

    `sp` needs no more memory than `tp`, which is left out where the sequence divides; and replicas over `dp` need as
    much as the others of them alone.
    """
    num_gpus, sizes = cluster.num_gpus, dict(choices)
    experts = cfg.model.experts
    sizes.setdefault("ep", (1,) if experts is None else divisors(math.gcd(experts.num, num_gpus)))
    if cfg.data.seq_len % num_gpus == 0:
        sizes.setdefault("tp", (1,))
    enough = least_gpus(cfg, cluster)
    node = cluster.gpus_per_node

    def is_searched(mesh: MeshConfig) -> bool:
        far = mesh.ep > node and mesh.cp > 1 and not {"ep", "cp"} <= choices.keys()
        wide = mesh.tensor > node and not {"sp", "tp"} & choices.keys()
        return num_gpus // mesh.dp >= enough and not far and not wide

    return sorted(filter(is_searched, meshes(num_gpus, sizes)), key=_simplicity)


def _simplicity(mesh: MeshConfig) -> tuple[int, int]:
    return mesh.dp, sum(size > 1 for size in mesh.sizes.values())


def _leanest(cfg: Config, cluster: Cluster, choices: Choices, mesh: MeshConfig) -> Iterator[Run]:
    """Yield the candidates on `mesh` of which one has the least memory.

    More micro-batches shrink activations; a single one, or as few as a pipeline takes, needs no sums of gradients
    or keeps fewer of them in flight.
    """
    sizes = divisors(max(cfg.train.global_batch // mesh.batch, 1))
    fewest = min((size for size in sizes if size >= mesh.pp), default=mesh.pp)
    lean = {**LEANEST, "microbatches": tuple({fewest, sizes[-1]}), **choices}
    lean |= {axis: (size,) for axis, size in mesh.sizes.items()}
    limit = POSSIBLE * cluster.gpu.usable_bytes
    for run in enumerate_runs(cfg, cluster, lean, AXES, limit_bytes=limit).runs:
        is_searched = "remat" in choices or is_tried(run, run.remat, cluster)
        if is_searched and ("pp" in choices or not mostly_padded(run)):
            yield run


def least_gpus(cfg: Config, cluster: Cluster) -> int:
    """Return a lower bound of the GPUs that `cfg` may fit: all memory that parameters, moments and gradients take."""
    shape = ModelShape.of(cfg.model)
    trained = adapter_params(cfg.model, cfg.train.lora) or shape.num_params
    moments = matrix_moment_bytes(cfg.optim) - host_moment_bytes(cfg.optim)
    state = (weight_bytes(cfg) + moments + 4) * trained
    if cfg.train.lora.enabled:
        state += (1 if cfg.frozen_in_fp8 else 2) * shape.num_params
    return math.ceil(state / (POSSIBLE * cluster.gpu.usable_bytes))
