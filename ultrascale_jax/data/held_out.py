"""Which documents are held out for evaluation: those with the smallest hashes.

A small corpus holds out exactly its share. A large corpus (`Corpus.is_small`) holds out the documents whose hash is
below a share of 2^64, which is one of `shards.LEVELS`, so that its index says how many tokens they have.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ultrascale_jax.config import UserError
from ultrascale_jax.data.corpus import Corpus
from ultrascale_jax.data.shards import LEVELS, hash_limit


def held_out_hashes(corpora: Sequence[np.ndarray], fraction: float) -> np.ndarray:
    """Return the hashes of the documents that no training split may see.

    Every corpus adds the `fraction` of its documents with the smallest hashes, at least one if it has two different
    documents. They are held out of all corpora, so a text that occurs twice, in one source or in two, is never on both
    sides.

    Args:
        corpora: uint64 [documents] of each corpus.
        fraction: share of the different documents to hold out.
    """
    held_out = [np.zeros(0, np.uint64)]
    for hashes in corpora if fraction > 0 else []:
        different = np.unique(hashes)
        count = min(max(1, round(fraction * different.size)), different.size - 1)
        held_out.append(different[:count])
    return np.unique(np.concatenate(held_out))


@dataclass(frozen=True, eq=False)
class Split:
    """One side of a corpus: the documents that are held out, or all others."""

    is_held_out: bool = False
    hashes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    """uint64 [hashes] that are held out."""
    level: int | None = None
    """Index into `LEVELS`: hashes below it are held out too."""

    def chosen(self, hashes: np.ndarray) -> np.ndarray:
        """Return int64 indices of the documents of this side, given uint64 [documents]."""
        is_held_out = np.isin(hashes, self.hashes)
        if self.level is not None:
            is_held_out |= hashes < hash_limit(LEVELS[self.level])
        return np.flatnonzero(is_held_out if self.is_held_out else ~is_held_out)

    def sizes(self, corpus: Corpus) -> np.ndarray:
        """Return int64 [shards], the tokens of this side in each shard of a large corpus."""
        assert corpus.below is not None and not self.hashes.size
        held_out = 0 * corpus.sizes if self.level is None else corpus.below[:, self.level]
        return held_out if self.is_held_out else corpus.sizes - held_out


ALL = Split()
"""Every document."""


class HeldOut:
    """The held-out documents of a run, which the corpora `evaluated` decide."""

    def __init__(self, evaluated: Sequence[Corpus], fraction: float):
        """Raises `UserError` where one of them is large and its index does not have `fraction`."""
        self._level, self._hashes = None, np.zeros(0, np.uint64)
        if all(corpus.is_small for corpus in evaluated):
            self._hashes = held_out_hashes([corpus.hashes for corpus in evaluated], fraction)
        elif fraction:
            if fraction not in LEVELS:
                above = min(max(bisect.bisect(LEVELS, fraction), 1), len(LEVELS) - 1)
                near = f"{LEVELS[above - 1]:g} and {LEVELS[above]:g}"
                fix = (
                    f"the index of a large source knows the tokens of {near}, not of this; give one"
                )
                raise UserError(f"data.eval_fraction={fraction}: {fix}")
            self._level = LEVELS.index(fraction)

    def split(self, corpus: Corpus, name: str, *, is_held_out: bool) -> Split:
        """Return one side of `corpus`, of which a later stage of `data.source` may have more than the first.

        Where small corpora decide, a large one leaves out the documents up to the next of `LEVELS`.
        """
        if corpus.is_small or not self._hashes.size:
            return Split(is_held_out, self._hashes, self._level)
        last = int(self._hashes[-1])
        level = next((i for i, share in enumerate(LEVELS) if last < hash_limit(share)), None)
        fix = "cannot leave out what the small sources of the first stage hold out; set data.eval_source"
        if level is None:
            raise UserError(f"data.source={name!r}: {fix}")
        return Split(is_held_out, level=level)
