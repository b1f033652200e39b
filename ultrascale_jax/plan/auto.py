"""Choose what a configuration leaves open: `train.remat`, `train.microbatches`, and the mesh if asked.

The planner's formulas rank every legal value on the GPUs at hand, as `ultrascale plan search` does, and the fastest
that fits is taken. Nothing is measured here and JAX is not asked, so every process of a run, and a laptop that plans
for the same machine, chooses the same in a moment.
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
from ultrascale_jax.plan.formulas.memory import fits_host, host_bytes
from ultrascale_jax.plan.hardware import GPUS, Cluster, Gpu, find_cluster
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.search.ranking import Search
from ultrascale_jax.plan.search.search_space import configured, pinned
from ultrascale_jax.plan.workload import Run
from ultrascale_jax.units import GIB

SAFE = 0.91
"""Share of a GPU's usable memory that a choice may need by formula; more only where no other candidate fits.

Of the programs of docs/planning/*.csv and docs/planning.md above 8 GiB, none needs more than 1.11 times the formula's
bytes and few more than 1.04 (experts in a pipeline, of which only the recipe `deepseek_v3` was compared, 1.06), and the
workspaces of cuDNN and cuBLAS, which XLA does not count, take up to 1.7 GiB, another 2.4% of an H100's 72.8.
"""

EQUAL = 1.02
"""Times the step of the fastest that a mesh with fewer axes may take, or one that offloads nothing: the formulas' own
error is larger."""

FREE: dict[str, Any] = {"remat": "auto", "microbatches": AUTO}
"""Fields that can be left open, and how."""

MODEL = "h100"
"""The GPU that devices stand for which the planner does not know: the large recipes are meant for its memory."""


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

    Devices that `plan/hardware.py` does not know, as those of a CPU, are planned as H100s.

    Args:
      kind: `device_kind` of all of them.
      num_devices: how many.
      usable_bytes: what a run may take of the memory of one; None, where JAX does not say: as much as of that GPU.
      host: what it may take of the host; None: as much as of the GPU's usual machine.
    """
    known = next((name for name, gpu in GPUS.items() if gpu.kind == kind), None)
    cluster = find_cluster(None, known or MODEL, num_devices)
    gpu = cluster.gpu
    if known is None:
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
    must_fit: bool = True,
) -> tuple[Config, str]:
    """Choose the fields of `cfg` that are `auto`: by formula the fastest that fits on `cluster`.

    A field that has a value keeps it. Return the configuration and a line that says what was chosen and why, which is
    empty if there was nothing to choose.

    Args:
      cfg: a run; what it leaves open is `cfg.train.auto`.
      cluster: the GPUs, as `find_cluster` or `cluster_of` describes them.
      choose_mesh: choose the mesh too, whatever `cfg.mesh` is.
      must_fit: refuse where nothing fits; otherwise choose what needs the least memory.

    Raises:
      UserError: nothing is legal on so many GPUs, or nothing fits.
    """
    require_type("cluster", cluster, Cluster, "find_cluster(None, 'h100', num_gpus) makes one")
    if not cfg.train.auto and not choose_mesh:
        return cfg, ""
    search = _search(cfg, cluster, choose_mesh=choose_mesh)
    if not search.counts["candidates"]:
        raise _nothing_legal(cfg, cluster, choose_mesh=choose_mesh)
    fits = [candidate.formula for candidate in search.ranking]
    if must_fit and not fits:
        raise _nothing_fits(cfg, cluster, search, choose_mesh=choose_mesh)
    run, why = _best(search, fits)
    chosen = configured(cfg, run) if choose_mesh else cfg
    chosen = with_changes(chosen, mesh=chosen.mesh, remat=run.remat, microbatches=run.microbatches)
    words = [f"--mesh {run.mesh.text}"] if choose_mesh else []
    words += [f"--train.{name} {getattr(run, name)}" for name in cfg.train.auto]
    at_once = f"{run.sequences} sequence{'s' * (run.sequences > 1)} a GPU at once"
    return chosen, f"{' '.join(words)} ({at_once}): by formula {why}"


def _search(cfg: Config, cluster: Cluster, *, choose_mesh: bool) -> Search:
    """Rank what `cfg` leaves open by formula."""
    search = Search(cfg, cluster, _choices(cfg, cluster, choose_mesh=choose_mesh))
    search.predict()
    return search


def _in_the_way(cfg: Config, cluster: Cluster, *, choose_mesh: bool) -> str:
    """Say which values of `cfg`, as few as possible, to leave open so that something fits; empty if none help."""
    pinned_fields = [name for name in FREE if name not in cfg.train.auto]
    for count in range(1, len(pinned_fields) + 1):
        for names in itertools.combinations(pinned_fields, count):
            freed = with_changes(cfg, mesh=cfg.mesh, **{name: FREE[name] for name in names})
            if _search(freed, cluster, choose_mesh=choose_mesh).ranking:
                return " and ".join(
                    f"train.{name}={FREE[name]!r} in place of {getattr(cfg.train, name)!r}"
                    for name in names
                )
    return ""


def _choices(cfg: Config, cluster: Cluster, *, choose_mesh: bool) -> dict[str, tuple[Any, ...]]:
    """Return what stays as it is."""
    choices = {"ulysses": (cfg.cp.ulysses,)} | pinned(cfg)
    if choose_mesh:
        return choices
    sizes = cfg.mesh.resolve(cluster.num_gpus).sizes
    choices |= {axis: (size,) for axis, size in sizes.items()}
    return choices | {"a2a_groups": (cfg.moe.a2a_groups,)}


def _best(search: Search, fits: list[StepPrediction]) -> tuple[Run, str]:
    """Return the fastest of those that fit with `SAFE`; otherwise what needs the least memory. And why it is taken."""
    on = f"{search.cluster.num_gpus} x {search.cluster.gpu.name}"
    usable, tried = search.usable_bytes, f"{search.counts['candidates']:,} tried"
    safe = [step for step in fits if step.peak_bytes <= SAFE * usable]
    if fits:
        best = min(safe or fits, key=lambda step: step.step_s if safe else step.peak_bytes)
        found = _simplest(best, safe)
        run, peak = found.run, found.peak_bytes
        why = f"the fastest that fits {on}" if safe else f"it just fits {on}, the leanest"
        if found is not best:
            why = f"the simplest within {EQUAL - 1:.0%} of {why}"
        why += f" of {tried}, {found.step_s:.3g} s a step,"
    else:
        assert search.closest is not None  # all candidates are misses
        peak, run = search.closest
        why = f"nothing fits {on}, the leanest of {tried},"
    why += f" {peak / GIB:.1f} of {usable / GIB:.1f} GiB a GPU"
    if moved := host_bytes(run):
        gpu = search.cluster.gpu
        why += f" and {moved / GIB:.1f} of {gpu.usable_host_bytes / GIB:.1f} GiB of its host, "
        why += f"at {costs.HOST_SHARE * gpu.host_gbs:.1f} GB/s"
    return run, why


def _simplest(best: StepPrediction, safe: list[StepPrediction]) -> StepPrediction:
    """Return the fastest of the simplest that are as fast as `best` within `EQUAL`; to offload counts as an axis."""

    def place(step: StepPrediction) -> tuple[int, float]:
        axes = sum(size > 1 for size in step.run.mesh.sizes.values())
        return axes + (step.host_bytes > 0), step.step_s

    return min((s for s in safe if s.step_s <= EQUAL * best.step_s), key=place, default=best)


def _nothing_fits(cfg: Config, cluster: Cluster, search: Search, *, choose_mesh: bool) -> UserError:
    """Say how much is missing, and with which open fields or which mesh it would fit."""
    assert search.closest is not None  # all candidates are misses
    need, run = search.closest
    if need <= search.usable_bytes:
        return _host_is_short(run, cluster.gpu)
    name = "mesh" if choose_mesh else f"train.{cfg.train.auto[0]}"
    fix = "take more GPUs, or a smaller data.seq_len"
    if values := _in_the_way(cfg, cluster, choose_mesh=choose_mesh):
        fix = f"give {values}, which is chosen then"
    elif not choose_mesh:
        with contextlib.suppress(UserError):
            other, _ = choose_auto(cfg, cluster, choose_mesh=True)
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
    """Say how much of the host's memory is missing for what a run offloads."""
    need, usable = host_bytes(run) / GIB, gpu.usable_host_bytes / GIB
    return UserError(
        f"train.remat={run.remat!r}: offloads {need:.1f} GiB of a GPU's activations, but of the host's memory "
        f"{usable:.1f} GiB are for one GPU; offload fewer names, take more train.microbatches, or train.remat=auto"
    )


def _nothing_legal(cfg: Config, cluster: Cluster, *, choose_mesh: bool) -> UserError:
    """Say why no candidate is legal: what the trainer's own check refuses, where it is that."""
    if choose_mesh:
        fix = "take another number of them, or another train.global_batch"
        if values := _in_the_way(cfg, cluster, choose_mesh=True):
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
