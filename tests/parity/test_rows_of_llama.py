"""Rows of the covering design whose model is Llama's train as one device does.

One file for each worker, so that it trains each model on one device once.
"""

import pytest

from tests.parity.rows import ROWS, WIDE_ROWS

NAMED = [pytest.param(row, id=row.name, marks=pytest.mark.slow) for row in ROWS]
NAMED += [pytest.param(row, id=row.name, marks=pytest.mark.wide) for row in WIDE_ROWS]


@pytest.mark.parametrize("row", [case for case in NAMED if case.values[0].model == "llama"])
def test_row_equals_one_device(row, assert_row_equals_one_device):
    assert_row_equals_one_device(row)
