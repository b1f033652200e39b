"""Layers of several kinds in any order: a pattern has a letter for each half of a layer, as Nemotron-H writes it.

    M-M-M-M*-M-M-M-M-M*-...    M- M- M- M *- M-  M- M- M- M *- M-  ...    a row of 6 layers, 4 of them
    M  linear attention    *  attention    -  an MLP    E  experts

A layer is a mixer and the feed-forward layer behind it, as in other models; or either alone, where two mixers or two
feed-forward layers follow each other.
"""

import functools
import itertools
import re

MIXERS, FEED_FORWARDS = "M*", "-E"

LAYER = re.compile(r"[M*][-E]?|[-E]")

MOST_HALVES = 1_000
"""Letters of a pattern at most."""

LONGEST_ROW = 16
"""Layers of a row at most: ZeRO-3 gathers a row as a whole."""


@functools.cache
def layers_of(pattern: str) -> tuple[str, ...]:
    """Cut a pattern into its layers, of one or two letters."""
    return tuple(LAYER.findall(pattern))


@functools.cache
def half_numbers(pattern: str) -> tuple[tuple[int, int], ...]:
    """Return the places in the pattern of the first and the last half of each layer."""
    ends = list(itertools.accumulate(map(len, layers_of(pattern)), initial=0))
    return tuple((first, stop - 1) for first, stop in itertools.pairwise(ends))


@functools.cache
def runs(pattern: str) -> tuple[range, ...]:
    """Return the runs of equal rows, as ranges of layers with a row's length as the step.

    A row is a layer, or several that are repeated. The division has the fewest layers to compile, and among such ones
    the fewest runs.
    """
    layers = layers_of(pattern)
    best: list[tuple[int, int, tuple[range, ...]]] = [(0, 0, ())]
    for start in reversed(range(len(layers))):
        ways = []
        for step in range(1, min(LONGEST_ROW, len(layers) - start) + 1):
            stop, row = start + step, layers[start : start + step]
            while True:
                if step == 1 or stop - start > step:
                    compiled, count, later_runs = best[len(layers) - stop]
                    ways.append(
                        (compiled + step, count + 1, (range(start, stop, step), *later_runs))
                    )
                if layers[stop : stop + step] != row:
                    break
                stop += step
        best.append(min(ways, key=lambda way: way[:2]))
    return best[-1][2]
