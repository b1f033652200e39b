"""Find how far a run reaches: the fewest GPUs on which it fits, and the longest sequence.

Both ask many times whether anything fits, which needs no time of a step (`leanest.py`).
"""

import dataclasses
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from ultrascale_jax.config import AXES, Config, MeshConfig, UserError
from ultrascale_jax.plan.hardware import Cluster
from ultrascale_jax.plan.prediction import StepPrediction
from ultrascale_jax.plan.search.leanest import leanest_verdict, least_gpus
from ultrascale_jax.plan.search.ranking import Search
from ultrascale_jax.plan.search.search_space import Choices
from ultrascale_jax.plan.verdict import DOES_NOT_FIT, FITS, UNSURE

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
"""Gets the progress, as text."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The farthest that fits, or may."""

    config: Config
    step: StepPrediction


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
      choices_of: returns the choices pinned on a number of GPUs; raises `UserError` for a number that it excludes.

    Returns:
      Both, none where there is none, each the fastest on its GPUs; and the largest number that was tried.
    """
    least = least_gpus(cfg, cluster)
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
    """Search for the fastest run that fits, or may fit."""
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
    fitting: int,
    tell: Tell = lambda text: None,
) -> int:
    """Return the tokens of the longest sequence that fits for certain within `choices`, exact to one of `SHARES` parts.

    Args:
      fitting: a length that fits, or 0.
    """

    def fits(tokens: int) -> bool:
        tell(f"do {tokens:,} tokens fit?")
        return _fits_length(cfg, cluster, choices, tokens)

    low = max(GRAIN, 2 ** (fitting.bit_length() - 1) if fitting else 0)
    if not fitting and not fits(low):
        return 0
    while low < LONGEST and fits(2 * low):
        low *= 2
    part = low // SHARES
    # A longer sequence may fit where a shorter one does not: its loss and its documents are cut otherwise.
    longer = range(2 * low - part, low, -part)
    return next((tokens for tokens in longer if fits(tokens)), low)


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
