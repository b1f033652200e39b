"""The order of a sequence over cp holds every token once, and gives each rank the chunks of its strategy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultrascale_jax.config import ContextConfig, UserError
from ultrascale_jax.sharding.sequence_order import sequence_order

BALANCED = ("zigzag", "allgather")


@st.composite
def cases(draw):
    """Places of the ring, ranks of one place, tokens of a rank, strategy."""
    sizes = [draw(st.integers(1, most)) for most in (9, 4, 9)]
    return (*sizes, draw(st.sampled_from(("ring", "zigzag", "allgather"))))


def chunks(seq_len: int, places: int) -> list[list[int]]:
    """The 2r chunks of a sequence, in its order, cut off one by one."""
    piece, tokens, cut = seq_len // places, list(range(seq_len)), []
    for i in range(2 * places):
        size = piece - piece // 2 if i < places else piece // 2
        cut.append(tokens[:size])
        tokens = tokens[size:]
    assert tokens == []
    return cut


@given(cases())
def test_ranks_of_a_place_share_its_early_and_its_late_chunk_in_equal_pieces(case):
    places, together, tokens, strategy = case
    cp, seq_len = places * together, places * together * tokens
    order = sequence_order(seq_len, cp, ContextConfig(strategy=strategy, ulysses=together))
    assert order.dtype == np.int64 and sorted(order) == list(range(seq_len))
    cut = chunks(seq_len, places)
    for rank in range(cp):
        place, inner = divmod(rank, together)
        if strategy in BALANCED:
            theirs = cut[place] + cut[2 * places - 1 - place]
        else:
            theirs = list(range(place * together * tokens, (place + 1) * together * tokens))
        mine = order[rank * tokens : (rank + 1) * tokens].tolist()
        assert mine == theirs[inner * tokens : (inner + 1) * tokens]
        assert mine == sorted(mine)


def test_the_natural_order_stays_where_there_is_one_place_or_no_balance():
    natural = np.arange(24)
    for context in (
        ContextConfig(strategy="ring"),
        ContextConfig(strategy="ring", ulysses=2),
        ContextConfig(strategy="ulysses"),
        ContextConfig(ulysses=4),
        ContextConfig(strategy="allgather", ulysses=4),
    ):
        np.testing.assert_array_equal(sequence_order(24, 4, context), natural)
    np.testing.assert_array_equal(sequence_order(24, 1, ContextConfig(ulysses=5)), natural)


def test_zigzag_over_four_ranks_by_hand():
    # Pieces of three tokens: chunks of two, then chunks of one.
    expected = [0, 1, 11, 2, 3, 10, 4, 5, 9, 6, 7, 8]
    assert sequence_order(12, 4, ContextConfig()).tolist() == expected
    expected = [0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8]
    assert sequence_order(12, 4, ContextConfig(ulysses=2)).tolist() == expected


@pytest.mark.parametrize(
    ("seq_len", "context", "named"),
    [(14, ContextConfig(), "seq_len=14: "), (24, ContextConfig(ulysses=3), "cp.ulysses=3: ")],
)
def test_what_does_not_divide_is_refused(seq_len, context, named):
    with pytest.raises(UserError, match=f"^{named}"):
        sequence_order(seq_len, 4, context)
