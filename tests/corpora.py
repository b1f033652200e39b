"""Corpora and folders of shards for tests."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from ultrascale_jax.data.corpus import Corpus
from ultrascale_jax.data.shards import (
    DOCUMENT,
    TABLE,
    Index,
    IndexWriter,
    write_atomic,
    write_shard,
)


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


def write_index(folder: Path, index: Index) -> None:
    """Write an index."""
    write_atomic(folder / TABLE, memoryview(np.ascontiguousarray(index.shards).view("u1")))
    IndexWriter(folder, index).save(complete=index.complete)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file in a folder, by its name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_random_shards(
    folder: Path,
    shards: int,
    documents: int,
    *,
    lengths: tuple[int, int] = (20, 60),
    dtype: str = "uint16",
    vocab_size: int = 100,
) -> str:
    """Write shards of random documents, of at least and less than `lengths` tokens; return their `data.source`."""
    rng, rows = np.random.default_rng(0), []
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(shards):
        sizes = rng.integers(*lengths, size=documents)
        tokens = [rng.integers(0, vocab_size, size=size).astype(dtype) for size in sizes]
        hashes = rng.integers(0, 2**64 - 1, size=documents, dtype=np.uint64)
        rows.append(write_shard(folder, number, tokens, sizes, hashes))
    save_index(folder, rows, dtype=dtype, tokenizer="bytes", vocab_size=vocab_size)
    return f"tokens:{folder}"
