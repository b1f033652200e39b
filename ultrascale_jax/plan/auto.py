"""Choose the fields that a configuration leaves open: `train.remat`, `train.microbatches`, and the mesh if requested.

The planner's formulas rank every legal value on the GPUs at hand, and the recommendation of `ultrascale plan search` is
taken. Nothing is measured or compiled here and JAX is not used, so every process of a run, and a laptop that plans for
the same machine, chooses the same.
"""

import contextlib
import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

from ultrascale_jax.config import (
    AUTO,
    GPU_MEMORY_SHARE,
    HOST_MEMORY_SHARE,
    Config,
    UserError,
    require_type,
    with_changes,
)
from ultrascale_jax.plan.formulas import costs
from ultrascale_jax.plan.formulas.memory import fits_host, host_bytes, host_moments
from ultrascale_jax.plan.hardware import Cluster, Gpu, find_cluster, gpu_of_kind
from ultrascale_jax.plan.search.ranking import EQUAL, Candidate, Search
from ultrascale_jax.plan.search.search_space import (
    Choices,
    changed_options,
    configured,
    pinned,
)
from ultrascale_jax.plan.verdict import FITS
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.units import GIB, counted

FREE: dict[str, Any] = {"remat": "auto", "microbatches": AUTO}
"""Fields that can be left open, and how."""

MODEL = "h100"
"""The GPU as which the planner takes unknown devices: the large recipes are meant for its memory."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host of a GPU, as far as a run may use it."""

    usable_bytes: int
    """Memory for one GPU's activations."""
    gbs: float | None = None
    """1e9 bytes a second from one GPU or to it, while all GPUs copy; None: as in the GPU's usual machine."""


def cluster_of(
    kind: str, num_devices: int, usable_bytes: int | None = None, host: Host | None = None
) -> Cluster:
    """Describe devices to the planner: links and speed by JAX's name for them, `device_kind`.

    Devices that `plan/hardware.py` does not know, such as CPU devices, are planned as H100s.

    Args:
      kind: `device_kind` of all of them.
      num_devices: how many.
      usable_bytes: what a run may take of the memory of one; None, where JAX does not say: as much as of that GPU.
      host: what it may take of the host; None: as much as of the GPU's usual machine.
    """
    gpu_name = gpu_of_kind(kind)
    cluster = find_cluster(None, gpu_name or MODEL, num_devices)
    gpu = cluster.gpu
    if gpu_name is None:
        gpu = dataclasses.replace(gpu, name=f"{kind} (planned as {gpu.name})")
    if usable_bytes is not None:
        gpu = dataclasses.replace(gpu, memory_gib=usable_bytes / GPU_MEMORY_SHARE / GIB)
    if host is not None:
        gbs = gpu.host_gbs if host.gbs is None else host.gbs / costs.HOST_SHARE
        share = host.usable_bytes / HOST_MEMORY_SHARE / GIB
        gpu = dataclasses.replace(gpu, host_gib=share, host_gbs=gbs)
    return dataclasses.replace(cluster, gpu=gpu)


def choose_auto(
    cfg: Config,
    cluster: Cluster,
    *,
    choose_mesh: bool = False,
    fixed: Choices | None = None,
    must_fit: bool = True,
) -> tuple[Config, str]:
    """Choose the fields of `cfg` that are `auto`: by formula the fastest that fits on `cluster`.

    A field that has a value keeps it. Return the configuration and a line with the choice and its reason, which is
    empty if there was nothing to choose.

    Args:
      cfg: a run; what it leaves open is `cfg.train.auto`.
      cluster: the GPUs, as `find_cluster` or `cluster_of` describes them.
      choose_mesh: choose the mesh too, and all that a search chooses with it, whatever `cfg` says.
      fixed: of these what stays; by default nothing.
      must_fit: refuse where nothing fits; otherwise choose what needs the least memory.

    Raises:
      UserError: nothing is legal on so many GPUs, or nothing fits.
    """
    require_type("cluster", cluster, Cluster, "find_cluster(None, 'h100', num_gpus) makes one")
    if not cfg.train.auto and not choose_mesh:
        return cfg, ""
    choices = dict(fixed or {}) if choose_mesh else choices_of_mesh(cfg, cluster)
    search = _search(cfg, cluster, choices)
    if not search.counts["candidates"]:
        raise _nothing_legal(cfg, cluster, choices, choose_mesh=choose_mesh)
    # A schedule that the configuration names is taken, whatever its drawback.
    best = search.recommend(search.ranking)
    if best is None and must_fit:
        raise _nothing_fits(cfg, cluster, search, choices, choose_mesh=choose_mesh)
    if best is None:
        assert search.closest is not None  # all candidates are misses
        run = search.closest[1]
    else:
        run = best.run
    chosen = configured(cfg, run) if choose_mesh else cfg
    chosen = with_changes(chosen, mesh=chosen.mesh, remat=run.remat, microbatches=run.microbatches)
    words = changed_options(cfg, chosen, mesh=choose_mesh)
    at_once = f"{counted(run.sequences, 'sequence')} a GPU at once"
    return chosen, f"{words} ({at_once}): by formula {_reason(search, best)}"


def _search(cfg: Config, cluster: Cluster, choices: Choices) -> Search:
    """Rank what `choices` leave open by formula."""
    search = Search(cfg, cluster, choices)
    search.predict()
    return search


def _in_the_way(cfg: Config, cluster: Cluster, choices: Choices) -> str:
    """Say which values of `cfg`, as few as possible, to leave open so that something fits; empty if none help."""
    kept = [name for name in FREE if name in choices]
    for count in range(1, len(kept) + 1):
        for names in itertools.combinations(kept, count):
            opened = {name: value for name, value in choices.items() if name not in names}
            freed = with_changes(cfg, mesh=cfg.mesh, **{name: FREE[name] for name in names})
            if _search(freed, cluster, opened).ranking:
                return " and ".join(
                    f"train.{name}={FREE[name]!r} in place of {choices[name][0]!r}"
                    for name in names
                )
    return ""


def choices_of_mesh(cfg: Config, cluster: Cluster) -> dict[str, tuple[Any, ...]]:
    """Return what stays as it is where the mesh does."""
    sizes = cfg.mesh.resolve(cluster.num_gpus).sizes
    kept = {"ulysses": (cfg.cp.ulysses,), "a2a_groups": (cfg.moe.a2a_groups,)}
    kept |= {"folding": (cfg.moe.folding,)} | pinned(cfg)
    return kept | {axis: (size,) for axis, size in sizes.items()}


def _reason(search: Search, best: Candidate | None) -> str:
    """Say why `best` is taken, or what needs the least memory where nothing fits."""
    on = f"{search.cluster.num_gpus} x {search.cluster.gpu.name}"
    usable, tried = search.usable_bytes, f"{search.counts['candidates']:,} tried"
    if best is None:
        assert search.closest is not None  # all candidates are misses
        peak, run = search.closest
        why = f"nothing fits {on}, the leanest of {tried},"
    else:
        step = best.formula
        run, peak = step.run, step.peak_bytes
        fastest = min(c.formula.step_s for c in search.ranking if c.verdict == best.verdict)
        why = f"unsure whether it fits {on}, the fastest of the leanest"
        if best.verdict == FITS:
            simplest = f"the simplest within {EQUAL - 1:.0%} of " * (step.step_s > fastest)
            why = f"{simplest}the fastest that fits {on}"
        why += f" of {tried}, {step.step_s:.3g} s a step,"
    why += f" {peak / GIB:.1f} of {usable / GIB:.1f} GiB a GPU"
    if moved := host_bytes(run):
        gpu = search.cluster.gpu
        why += f" and {moved / GIB:.1f} of {gpu.usable_host_bytes / GIB:.1f} GiB of its host, "
        why += f"at {costs.HOST_SHARE * gpu.host_gbs:.1f} GB/s"
    if best is not None:
        why += search.doubt(best)
    return why


def _nothing_fits(
    cfg: Config, cluster: Cluster, search: Search, choices: Choices, *, choose_mesh: bool
) -> UserError:
    """Say how much is missing, and with which open fields or which mesh it would fit."""
    assert search.closest is not None  # all candidates are misses
    need, run = search.closest
    if not fits_host(run, cluster.gpu):
        return _host_is_short(run, cluster.gpu)
    name = "mesh" if choose_mesh else f"train.{cfg.train.auto[0]}"
    fix = ", ".join([*map("take {}".format, search.resorts), "take more GPUs"])
    fix = f"{fix}, or a smaller data.seq_len" + f"; {search.not_enough}" * bool(search.not_enough)
    if values := _in_the_way(cfg, cluster, choices):
        fix = f"give {values}, which is chosen then"
    elif not choose_mesh:
        with contextlib.suppress(UserError):
            other, _ = choose_auto(cfg, cluster, choose_mesh=True, fixed=pinned(cfg))
            fix = f"take --mesh {other.mesh.text}, or more GPUs"
    return UserError(
        f"{name}='auto': nothing fits {cluster.num_gpus} x {cluster.gpu.name}: {run.label}, the leanest, needs "
        f"{need / GIB:.1f} of {search.usable_bytes / GIB:.1f} GiB a GPU; {fix}"
    )


def check_host(cfg: Config, cluster: Cluster) -> None:
    """Raise a `UserError` if `cfg`, which leaves nothing open, offloads more than the host can hold."""
    run = Run.of(cfg, cluster.num_gpus)
    if not fits_host(run, cluster.gpu):
        raise _host_is_short(run, cluster.gpu)


def _host_is_short(run: Run, gpu: Gpu) -> UserError:
    """Say how much of the host's memory is missing for the tensors that a run offloads."""
    moments, usable = host_moments(run) / GIB, gpu.usable_host_bytes / GIB
    offloads = f"offloads {host_bytes(run) / GIB - moments:.1f} GiB of a GPU's activations"
    fix = "offload fewer names, take more train.microbatches, or train.remat=auto"
    if moments:
        offloads += f", beside {moments:.1f} GiB of its moments by optim.offload"
        fix += ", or another optim.offload"
    return UserError(
        f"train.remat={run.remat}: {offloads}, but of the host's memory {usable:.1f} GiB are for one GPU; {fix}"
    )


def _nothing_legal(
    cfg: Config, cluster: Cluster, choices: Choices, *, choose_mesh: bool
) -> UserError:
    """Say why no candidate is legal: what the trainer's own check refuses, where it is that."""
    if choose_mesh:
        fix = "take another number of them, or another train.global_batch"
        if values := _in_the_way(cfg, cluster, choices):
            fix = f"give {values}, which is chosen then"
        return UserError(f"mesh='auto': none is legal on {cluster.num_gpus} GPUs; {fix}")
    train, mesh = cfg.train, cfg.mesh.resolve(cluster.num_gpus)
    count = mesh.pp if "microbatches" in train.auto else train.microbatches
    remat = "full" if "remat" in train.auto else train.remat
    try:
        with_changes(cfg, mesh=mesh, remat=remat, microbatches=count).check(cluster.num_gpus)
    except UserError as error:
        return error
    return UserError(f"train.microbatches={count}: must be at least mesh.pp={mesh.pp}")
