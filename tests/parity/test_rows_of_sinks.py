"""Rows of the covering design train as one device does: models with sinks and windows."""

from tests.parity.comparison import make_tests
from tests.parity.rows import ROWS, kind

test_one_device_trains_the_model, test_row_equals_one_device = make_tests(
    row for row in ROWS if kind(row) == "sinks"
)
