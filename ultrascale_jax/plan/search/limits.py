"""Find how far a run reaches: the fewest GPUs on which it fits, and the longest sequence.

Both ask many times whether anything fits, which needs no time of a step: on each mesh only the leanest candidates are
counted, with full recomputation, its inputs on the device or on the host, and the first that fits ends the question.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ultrascale_jax.config import AXES, Config, MeshConfig, UserError
from ultrascale_jax.plan.formulas.memory import breakdown, fits_host
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.model_shape import ModelShape, adapter_params
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.search.ranking import Search
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
from ultrascale_jax.plan.workload import Run, host_moment_bytes, moment_bytes, weight_bytes

LEANEST: Choices = {
    "remat": ("full", INPUTS),
    "stash": ("input",),
    "schedule": ("1f1b", "interleaved", "afab"),
    "zero": (0, 2, 3),
}
"""Values with which a mesh needs the least memory, where they are free; ZeRO-0 stands for meshes that shard nothing.

With few micro-batches afab may need the least: no tick has forward and backward passes.
"""

FARTHEST = 16
"""Numbers of GPUs are tried up to so many times the number whose memory holds the state alone."""

SHARES = 8
"""A longest sequence on any mesh is exact to so many parts of a power of two."""

GRAIN = 1024
"""A longest sequence on one mesh is a multiple of so many tokens at least."""

LONGEST = 2**27
"""No sequence is tried that is longer; nobody has trained with one."""

BEYOND = 64
"""So many lengths beyond the first that does not fit are tried: a longer sequence may fit, whose loss is cut into
smaller chunks."""

type Tell = Callable[[str], None]
"""Gets the progress, in words."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The farthest that fits, or may."""

    config: Config
    step: StepPrediction


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
    enough = _least_gpus(cfg, cluster)
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

    More micro-batches make activations smaller; a single one, or as few as a pipeline takes, needs no sums of gradients
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


def _least_gpus(cfg: Config, cluster: Cluster) -> int:
    """Return a lower bound of the GPUs that `cfg` may fit: all memory that parameters, moments and gradients take."""
    shape = ModelShape.of(cfg.model)
    trained = adapter_params(cfg.model, cfg.train.lora) or shape.num_params
    moments = moment_bytes(cfg.optim) - host_moment_bytes(cfg.optim)
    state = (weight_bytes(cfg) + moments + 4) * trained
    if cfg.train.lora.enabled:
        state += 2 * shape.num_params
    return math.ceil(state / (POSSIBLE * cluster.gpu.usable_bytes))


def fewest_gpus(
    cfg: Config,
    cluster: Cluster,
    choices_of: Callable[[int], Choices],
    tell: Tell = lambda text: None,
) -> tuple[Reach | None, Reach | None, int]:
    """Find the fewest GPUs on which `cfg` fits for certain, and the fewest on which it may, if these are fewer.

    Args:
      cfg: a run, of which the mesh does not matter.
      cluster: the GPUs; their number does not matter.
      choices_of: returns what is pinned on a number of GPUs; raises `UserError` for a number that it excludes.

    Returns:
      Both, none where there is none, each the fastest on its GPUs; and the largest number that was tried.
    """
    least = _least_gpus(cfg, cluster)
    unsure: Reach | None = None
    node = cluster.gpus_per_node
    most = node * math.ceil(FARTHEST * least / node)
    for count in range(least, most + 1):
        if count > node and count % node:
            continue
        tell(f"does it fit {count} GPUs?")
        machine = dataclasses.replace(cluster, num_gpus=count)
        try:
            choices = choices_of(count)
        except UserError:
            continue
        verdict = leanest_verdict(cfg, machine, choices)
        if verdict == DOES_NOT_FIT or (verdict == UNSURE and unsure is not None):
            continue
        reached = fastest(cfg, machine, choices)
        if verdict == FITS:
            return reached, unsure, count
        unsure = reached
    return None, unsure, most


def fastest(cfg: Config, cluster: Cluster, choices: Choices) -> Reach:
    """Search for the fastest of what fits, or may."""
    search = Search(cfg, cluster, choices)
    search.predict()
    winner = search.winner or search.recommend(search.ranking)
    assert winner is not None  # a lean candidate fits
    return Reach(config=winner.configured(cfg), step=winner.formula)


def longest_on(cfg: Config, cluster: Cluster, choices: Choices) -> int:
    """Return the tokens of the longest sequence that fits for certain on the one mesh of `choices`; 0 where none does.

    It is a multiple of `GRAIN`, or of twice the ranks that share a sequence.
    """
    mesh = MeshConfig.of(**{axis: choices[axis][0] for axis in AXES})
    grain = math.lcm(GRAIN, 2 * mesh.cp * mesh.tensor)

    def fits(count: int) -> bool:
        return _fits_length(cfg, cluster, choices, count * grain)

    most = LONGEST // grain
    count = _largest(fits, most)
    longer = range(min(count + BEYOND, most), count, -1) if count else ()
    return grain * next((further for further in longer if fits(further)), count)


def longest(
    cfg: Config,
    cluster: Cluster,
    choices: Choices,
    known: int,
    tell: Tell = lambda text: None,
) -> int:
    """Return the tokens of the longest sequence that fits for certain within `choices`, exact to one of `SHARES` parts.

    Args:
      known: a length that fits, or 0.
    """

    def fits(tokens: int) -> bool:
        tell(f"do {tokens:,} tokens fit?")
        return _fits_length(cfg, cluster, choices, tokens)

    low = max(GRAIN, 2 ** (known.bit_length() - 1) if known else 0)
    if not known and not fits(low):
        return 0
    while low < LONGEST and fits(2 * low):
        low *= 2
    part = low // SHARES
    return low + part * _largest(lambda count: fits(low + count * part), SHARES - 1)


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` for which `holds`, as for all smaller ones; 0 where there is none."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _fits_length(cfg: Config, cluster: Cluster, choices: Choices, tokens: int) -> bool:
    """Say whether sequences of so many tokens fit for certain."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            longer = with_length(cfg, tokens)
            return leanest_verdict(longer, cluster, choices) == FITS
        except UserError:
            return False


def with_length(cfg: Config, tokens: int) -> Config:
    """Return `cfg` with sequences of so many tokens."""
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, seq_len=tokens))
