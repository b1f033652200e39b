"""The rows have every legal pair of values, and the page says so."""

from tests.parity import test_fp8
from tests.parity.rows import DOCS, TESTED, WIDE_ROWS, may_be_wide, page, rows_of_pairs
from ultrascale_jax.config import FP8


def words(pairs) -> str:
    return ", ".join(" x ".join(pair) for pair in pairs)


def test_every_legal_pair_stands_in_a_row():
    missing = [pair for pair, rows in rows_of_pairs((*TESTED, *WIDE_ROWS)).items() if not rows]
    assert not missing, f"no row of tests/parity/rows.py has {words(missing)}"


def test_make_test_runs_all_pairs_but_some_of_a_schedule():
    missing = [pair for pair, rows in rows_of_pairs(TESTED).items() if not rows]
    missing = [pair for pair in missing if not may_be_wide(pair)]
    assert not missing, f"no row of make test has {words(missing)}"


def test_every_form_of_fp8_stands_in_a_row():
    assert {test_fp8.TABLE[name][1]["precision"] for name in test_fp8.SLOW} == set(FP8)


def test_the_page_has_the_pairs_of_the_rows():
    assert DOCS.read_text() == page(), "run python -m tests.parity.rows docs"
