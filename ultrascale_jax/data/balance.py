"""Deal the rows of a batch to devices, and order the documents of a row, so that all have as much attention to compute.

Ranks that share a row wait in every layer for the one with the most work. The order of its documents changes no result:
none sees another. A document that is too long for its place in the ring stays on the ranks that it spans, so the
busiest has more than the mean where a row is neither of short documents nor of one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SWAPS = 128
"""Orders of a row's documents that are tried."""
EVEN = 1.02
"""The busiest rank's work over the mean that is good enough."""


def attention_work(lengths: Sequence[int]) -> int:
    """Return the work of attention in a row of documents of these lengths: the sum of their squares."""
    return sum(length**2 for length in lengths)


def deal_rows(work: np.ndarray, shards: int, microbatches: int) -> np.ndarray:
    """Return the row for each place of a batch whose rows are split over `shards` devices, one after another.

    Rows with similar work form a micro-batch, since its devices wait for each other; each round of `shards` rows of a
    micro-batch is dealt in the opposite direction of the previous round. Micro-batch m is every M-th row of a device.
    Rows with equal work stay where they are.

    Args:
      work: `[B]`; shards times micro-batches divide B.
      shards: devices, or groups of them, with rows of their own.
      microbatches: micro-batches of a step (M).
    """
    if (work == work[0]).all():
        return np.arange(work.size)
    rounds = np.argsort(-work, kind="stable").reshape(microbatches, -1, shards)
    rounds[:, 1::2] = rounds[:, 1::2, ::-1]
    return rounds.transpose(2, 1, 0).reshape(-1)


class Chunks(NamedTuple):
    """The chunks of a row, in its order, and the places of a ring that hold them."""

    borders: np.ndarray
    """First token of each chunk, and the end of the row."""
    owners: np.ndarray
    """Place of each chunk."""
    places: int

    @classmethod
    def of(cls, order: np.ndarray, places: int) -> "Chunks":
        """Return the chunks of `sequence_order`'s result."""
        owner = np.empty(order.size, int)
        owner[order.reshape(places, -1)] = np.arange(places)[:, None]
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        return cls(np.append(starts, owner.size), owner[starts], places)

    def work(self, lengths: np.ndarray) -> np.ndarray:
        """Return how many keys the queries of each place see in a row of documents of these lengths."""
        starts, whole = np.cumsum(lengths) - lengths, _triangle(lengths)
        # Keys that the tokens before each border see: of whole documents, and of a part of one.
        at = np.searchsorted(starts, self.borders, side="right") - 1
        seen = (np.cumsum(whole) - whole)[at] + _triangle(self.borders - starts[at])
        return np.bincount(self.owners, np.diff(seen), self.places)


def _triangle(tokens: np.ndarray) -> np.ndarray:
    return tokens * (tokens + 1) // 2


def order_documents(lengths: np.ndarray, chunks: Chunks) -> np.ndarray:
    """Return documents of these lengths in an order in which the busiest place has little work.

    Of random swaps of two documents those are kept that do not make it busier. The arguments decide the result.
    """
    order, work = np.arange(lengths.size), chunks.work(lengths)
    least, enough = work.max(), EVEN * work.mean()
    for pair in np.random.default_rng(0).integers(lengths.size, size=(SWAPS, 2)):
        if least <= enough:
            break
        tried = order.copy()
        tried[pair] = order[pair[::-1]]
        if (busiest := chunks.work(lengths[tried]).max()) <= least:
            order, least = tried, busiest
    return order


def balanced_tokens(segment_ids: np.ndarray, chunks: Chunks) -> np.ndarray:
    """Return the tokens of a row `[T]` of packed documents, these in the order of `order_documents`."""
    starts = np.flatnonzero(np.diff(segment_ids, prepend=-1))
    documents = np.split(np.arange(segment_ids.size), starts[1:])
    lengths = np.array([len(document) for document in documents])
    return np.concatenate([documents[i] for i in order_documents(lengths, chunks)])
