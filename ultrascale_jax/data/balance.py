"""Deal the rows of a batch to devices so that all of them have as much attention to compute."""

from collections.abc import Sequence

import numpy as np


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
