"""The rows have every legal pair of values, and the page says so."""

from tests.parity.rows import (
    DOCS,
    NIGHTLY_ROWS,
    PRECISIONS,
    TESTED,
    day_of_page,
    page,
    rows_of_pairs,
)


def missing(rows) -> str:
    """Name the legal pairs of values that none of the rows has."""
    return ", ".join(" x ".join(pair) for pair, found in rows_of_pairs(rows).items() if not found)


def test_every_legal_pair_stands_in_a_row_of_make_test():
    assert not missing(TESTED), "no row of tests/parity/rows.py has it"


def test_every_pair_of_other_values_than_precisions_stands_in_a_row_in_float32():
    exact = [row for row in (*TESTED, *NIGHTLY_ROWS) if row.precision == "fp32"]
    pairs = [pair for pair, rows in rows_of_pairs(exact).items() if not rows]
    assert not [pair for pair in pairs if not set(pair) & set(PRECISIONS)]


def test_the_page_has_the_pairs_of_the_rows():
    assert DOCS.read_text() == page(day_of_page()), "run python -m tests.parity.rows docs"
