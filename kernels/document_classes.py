"""Classes of documents by length, for attention that takes each class in one call (`attention_packed.py`); no JAX.

The call of a class takes documents of more than L / 4 and at most L tokens, of which n tokens have fewer than 4 n / L.
Only the first class has no least length: it has room for documents of `SHORTEST_MEAN` tokens on average.
"""

RATIO = 4
"""Longest over shortest document of a class, and segments in L tokens for which its call has room."""

SHORTEST = 128
"""Least L of a class: the rows of scores that cuDNN computes at once."""

SHORTEST_MEAN = 32
"""Mean tokens of the first class' documents for which its call has room."""

LEAST_TOKENS = 2048
"""Tokens of a row from which on the classes cost less than a mask."""


def class_lengths(seq_len: int) -> tuple[int, ...]:
    """Return L of each class for rows of `seq_len` tokens, in increasing order."""
    lengths = [seq_len]
    while lengths[0] % RATIO == 0 and lengths[0] // RATIO >= SHORTEST:
        lengths.insert(0, lengths[0] // RATIO)
    return tuple(lengths)


def class_segments(seq_len: int) -> tuple[int, ...]:
    """Return the segments in L tokens for which the call of each class has room (M)."""
    lengths = class_lengths(seq_len)
    return (max(RATIO, lengths[0] // SHORTEST_MEAN), *[RATIO] * (len(lengths) - 1))


def max_documents(seq_len: int) -> int:
    """Return how many documents every row of `seq_len` tokens may have, however short they are."""
    return class_segments(seq_len)[0] * (seq_len // class_lengths(seq_len)[0])


def divides(seq_len: int) -> bool:
    """Return whether rows of `seq_len` tokens divide into classes, of which the first is short."""
    return seq_len >= LEAST_TOKENS and class_lengths(seq_len)[0] < RATIO * SHORTEST
