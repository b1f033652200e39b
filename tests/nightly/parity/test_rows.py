"""Rows of the covering design in float32 that have the pairs which stand by day in bf16 or fp8 alone."""

import pytest

from tests.parity.comparison import compare_row
from tests.parity.rows import NIGHTLY_ROWS


@pytest.mark.parametrize("row", NIGHTLY_ROWS, ids=lambda row: row.name)
def test_row_equals_one_device(row):
    compare_row(row)
