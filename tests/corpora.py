"""Corpora and folders of shards for tests."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from ultrascale_jax.data.corpus import Corpus
from ultrascale_jax.data.shards import DOCUMENT, Index, write_index


def corpus_of(
    tokens: np.ndarray,
    lengths: Sequence[int],
    hashes: Sequence[int] | np.ndarray,
    borders: Sequence[int] = (),
    **fields,
) -> Corpus:
    """Return documents of these lengths in memory, in a shard each up to the documents `borders`; one without them."""
    lengths = np.asarray(lengths)
    documents = np.zeros(lengths.size, DOCUMENT)
    documents["hash"] = hashes
    cuts = [0, *sorted(set(borders) - {0, lengths.size}), lengths.size]
    arrays, parts, ends = [], [], np.cumsum(lengths)
    for first, stop in pairwise(cuts):
        part = documents[first:stop]
        part["end"] = np.cumsum(lengths[first:stop])
        parts.append(part)
        arrays.append(tokens[ends[stop - 1] - part["end"][-1] : ends[stop - 1]])
    sizes, counts = np.array([x.size for x in arrays]), np.array([part.size for part in parts])
    names = tuple(f"array {i}" for i in range(len(parts)))
    return Corpus(tuple(arrays), tuple(parts), sizes, counts, "", names, **fields)


def save_index(folder: Path, shards: Sequence[np.ndarray], **fields) -> Index:
    """Write the index of `shards`, rows of `write_shard`, and return it."""
    index = Index(**{"complete": True, "shards": np.array(shards), **fields})
    write_index(folder, index)
    return index
