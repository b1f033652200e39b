"""Compute the buffer rows of expert parallelism; standard library only, because the planner imports it too."""

import math
from dataclasses import dataclass

from ultrascale_jax.config import Experts, MoEConfig

DENSE_OR_SHARED = "dense_or_shared"
"""Scope of the conditional in which a layer of a pipeline computes a dense layer in place of shared experts."""


@dataclass(frozen=True)
class A2AStage:
    """One exchange of tokens between the parts of a group."""

    parts: int
    """Parts that exchange."""
    experts: int
    """Experts of one part."""
    rows: int
    """Rows that one part sends to another in one round."""


def hit_fraction(experts: Experts, count: int) -> float:
    """Return the share of tokens that balanced routing sends to at least one of `count` neighbouring experts.

    The router opens groups by their best scores, so each open group is taken to have the same number of a token's k
    experts, or one more. They are any j of the `size` in the group: the chance that `count` hold none of them is
    C(size - count, j) / C(size, j).
    """
    size, opened = experts.num // experts.groups, experts.groups_per_token
    if count > size:
        closed = experts.groups - math.ceil(count / size)
        return 1 - math.comb(closed, opened) / math.comb(experts.groups, opened)
    j, remainder = divmod(experts.top_k, opened)
    missed = (opened - remainder) * math.comb(size - count, j) / math.comb(size, j)
    if remainder:
        missed += remainder * math.comb(size - count, j + 1) / math.comb(size, j + 1)
    return (opened - missed) / experts.groups


def capacity(tokens: int, expected: float, capacity_factor: float) -> int:
    """Return buffer rows for `expected` of at most `tokens` rows: `capacity_factor` times as many, a multiple of 8."""
    return min(tokens, 8 * math.ceil(capacity_factor * expected / 8))


def one_expert_per_rank(experts: Experts, ranks: int) -> bool:
    """Return whether each of `ranks` ranks has one expert."""
    return experts.num == ranks


def expert_capacity_factor(moe: MoEConfig, experts: Experts, ranks: int) -> float:
    """Return the rows for which an expert has room in a first round, as a multiple of the balanced ones.

    One that is alone on its rank gets what `ranks` ranks send there. Chance makes this sum deviate less than the rows
    of one rank, by the square root of their number, so as much less room is as often enough.
    """
    if one_expert_per_rank(experts, ranks):
        return 1 + (moe.capacity_factor - 1) / math.sqrt(ranks)
    return moe.capacity_factor


def later_rows(rows: int, *, alone: bool = False) -> int:
    """Return the rows of each place in a round after a first one of `rows`: a part of them, a multiple of 8.

    A further round takes the few rows for which the first has no room. An expert that is `alone` on its rank has many
    rows, of which as small a share is left over as `expert_capacity_factor` gives it less room.
    """
    return 8 * math.ceil(rows / (8 * (32 if alone else 8)))


def scaled(rows: int, tokens: int, first: int) -> int:
    """Return buffer rows for `tokens` of a later round, where the `first` tokens of the first one have `rows`."""
    return rows if tokens == first else capacity(tokens, rows * tokens / first, 1)


def num_chunks(moe: MoEConfig, ranks: int, tokens: int) -> int:
    """Return the parts of a rank's tokens: one is sent while another is computed; an odd number is not cut."""
    return 2 if moe.overlap and ranks > 1 and tokens % 2 == 0 else 1


def a2a_stages(moe: MoEConfig, experts: Experts, ranks: int, tokens: int) -> list[A2AStage]:
    """Return the exchanges between `ranks` ranks with `tokens` tokens each; none for one rank."""
    if ranks == 1:
        return []
    stages, left, sources = [], ranks, 1
    for parts in (moe.a2a_groups, ranks // moe.a2a_groups) if moe.a2a_groups > 1 else (ranks,):
        left //= parts
        count = left * experts.num // ranks
        arrived = stages[-1].parts * stages[-1].rows if stages else tokens
        rows = capacity(
            arrived, sources * tokens * hit_fraction(experts, count), moe.capacity_factor
        )
        stages.append(A2AStage(parts, count, rows))
        sources *= parts
    return [stage for stage in stages if stage.parts > 1]
