"""Order a sequence over the context axis: choose the tokens that each rank of `cp` holds.

The work of a causal query grows with its place. So if each rank holds one stretch of the sequence, ranks with early
stretches wait. In zigzag each place of a ring of r has two of 2r chunks, one early and one late:

    place    0     1     2     3
    chunks  0 7   1 6   2 5   3 4

The loader hands out the data in this order, once a batch, and the model runs in it: positions go with their tokens.
"""

import itertools

import numpy as np

from ultrascale_jax.config import ContextConfig, Strategy, require, require_type


def sequence_order(seq_len: int, cp: int, context: ContextConfig | Strategy) -> np.ndarray:
    """Return int64 [T], the token at each place: an array in the strategy's order is `x[:, order]`.

    Rank c of `cp` holds the c-th of `cp` equal shards of that. The ranks of one place of the ring (`cp.ulysses`) divide
    its two chunks in this order; of a shard with an odd number of tokens the early chunk has one more. It is the
    natural order for `ring`, `ulysses` and a ring of one.

    Args:
        seq_len: tokens of a sequence (T), divisible by `cp`.
        cp: size of the mesh axis.
        context: strategy, and ranks that share a place; or the strategy's name.

    Raises:
        UserError: `seq_len` or `context.ulysses` does not divide so.
    """
    if isinstance(context, str):
        context = ContextConfig(strategy=context)
    require_type("context", context, ContextConfig, 'as ContextConfig(strategy="zigzag")')
    require(seq_len % cp == 0, "seq_len", seq_len, f"must be divisible by mesh.cp={cp}")
    places, _ = context.ranks(cp)
    order = np.arange(seq_len)
    if context.chunks == 1:
        return order
    piece = seq_len // places
    early = -(-piece // 2)
    chunks = (
        order[: places * early].reshape(places, early),
        order[places * early :].reshape(places, piece - early)[::-1],
    )
    return np.concatenate(chunks, axis=1).ravel()


def stretches(
    tokens: int, cp: int, context: ContextConfig
) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Return the stretches of neighbouring tokens that each of `cp` ranks holds, one or two.

    Returns:
        For each stretch its first place among the `tokens` of a rank, and the one after its last: the same on all
        ranks. And int64 `[cp, stretches]`, the number of each in the order of the sequence.

    Raises:
        UserError: as `sequence_order`.
    """
    order = sequence_order(tokens * cp, cp, context).reshape(cp, tokens)
    breaks = np.flatnonzero((np.diff(order, axis=1) != 1).any(axis=0)) + 1
    ends = [0, *breaks.tolist(), tokens]
    firsts = order[:, ends[:-1]]
    return list(itertools.pairwise(ends)), np.argsort(np.argsort(firsts, axis=None)).reshape(
        firsts.shape
    )
