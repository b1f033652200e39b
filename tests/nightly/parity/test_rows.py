"""Rows of the covering design train as one device does: precisions below float32."""

from tests.parity.comparison import make_tests
from tests.parity.rows import NIGHTLY_ROWS

test_one_device_trains_the_model, test_row_equals_one_device = make_tests(NIGHTLY_ROWS)
