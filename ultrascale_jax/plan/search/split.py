"""Find the fewest layers that need a policy of recomputation where the others have a faster one.

The policy that fits a mesh with gigabytes to spare is often the neighbour of one that misses by a few.
Memory is linear in the number of layers under either (`Run.by_policy`), so the number follows from two sums of bytes.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ultrascale_jax.config import Split, offloads
from ultrascale_jax.plan.formulas.memory import breakdown, fits_host
from ultrascale_jax.plan.hardware import Gpu
from ultrascale_jax.plan.verdict import FITS, SURE, Verdict, by_formula
from ultrascale_jax.plan.workload import Run


class Judged(NamedTuple):
    """A run with one policy for all layers, and whether it fits."""

    run: Run
    peak_bytes: int
    verdict: Verdict


def neighbours(judged: Sequence[Judged]) -> Iterator[tuple[Judged, Judged]]:
    """Yield the first run that fits for certain, and the one before it, which does not: without a host, and with one.

    Args:
      judged: runs that differ in the tensors kept for the backward pass alone, from the one that keeps the most.
    """
    # A stage that stashes its input has the residuals of one micro-batch alone. Without a pipeline `none` is slower.
    stashing = [
        one
        for one in judged
        if one.run.stash == "residuals" and (one.run.mesh.pp > 1 or one.run.remat != "none")
    ]
    on_device = [one for one in stashing if not offloads(one.run.remat)]
    on_host = [one for one in stashing if offloads(one.run.remat) or one.run.remat == "dots"]
    for chain in (on_device, on_host):
        place = next((i for i, one in enumerate(chain) if one.verdict == FITS), 0)
        if place:
            yield chain[place], chain[place - 1]


def fewest_layers(lean: Judged, rich: Judged, gpu: Gpu) -> tuple[Run, int] | None:
    """Return the run with the policy of `lean` in as few layers as fit, that of `rich` in the others, and its bytes.

    None where only all layers fit, or where `rich` lacks memory of the host.
    """

    def split(layers: int) -> tuple[Run, int]:
        run = rich.run.with_remat(Split(first=lean.run.policy, layers=layers, last=rich.run.policy))
        return run, breakdown(run).peak_bytes

    every, limit = lean.run.split_layers, SURE * gpu.usable_bytes
    if every == 1 or rich.peak_bytes <= limit:
        return None
    # The first layer also brings the working memory of `lean`; each further one saves the same.
    (_, most), (_, least) = split(1), split(every - 1)
    if least > limit:
        return None
    further = 0 if most <= limit else (every - 2) * (most - limit) / (most - least)
    starts = lean.run.shape.row_starts
    layers = next((start for start in starts if start >= 1 + further), every)
    if layers >= every:
        return None
    run, peak = split(layers)
    fits = by_formula(peak, gpu.usable_bytes) == FITS and fits_host(run, gpu)
    return (run, peak) if fits else None
