"""The rows have every legal pair of values, and the page says so."""

from tests.parity.rows import (
    DOCS,
    NIGHTLY_ROWS,
    PAIRS,
    PRECISIONS,
    TESTED,
    day_of_page,
    page,
    rows_of_pairs,
    table,
)


def missing(rows, *, besides=()) -> str:
    """Name the legal pairs of values, without those of `besides`, that none of the rows has."""
    pairs = [pair for pair, found in rows_of_pairs(rows).items() if not found]
    return ", ".join(" x ".join(pair) for pair in pairs if not set(pair) & set(besides))


def test_every_legal_pair_stands_in_a_row():
    assert not missing((*TESTED, *NIGHTLY_ROWS)), "no row of tests/parity/rows.py has it"


def test_make_test_has_every_pair_in_float32():
    assert {row.precision for row in TESTED} == {"fp32"}
    assert not missing(TESTED, besides=set(PRECISIONS) - {"fp32"}), "no row of `ROWS` has it"


def test_the_page_has_the_pairs_of_the_rows():
    written = DOCS.read_text(), PAIRS.read_text()
    assert written == (page(day_of_page()), table()), (
        f"run python -m tests.parity.rows docs {day_of_page()}"
    )
