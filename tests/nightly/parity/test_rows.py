"""Rows that `make test` leaves out train as one device does: precisions below float32, and seven axes at once."""

import pytest

from tests.parity import fp8
from tests.parity.comparison import compare, make_tests
from tests.parity.rows import NIGHTLY_ROWS
from tests.parity.seven_axes import compare_in_process

test_one_device_trains_the_model, test_row_equals_one_device = make_tests(NIGHTLY_ROWS)


@pytest.mark.parametrize("name", fp8.NIGHTLY_ROWS)
def test_fp8_on_a_mesh_is_fp8_on_one_device(name):
    compare(fp8.configure(*fp8.NIGHTLY_ROWS[name]), evaluates=True, seeds=(0,))


@pytest.mark.parametrize("model", ["fp8", "qwen3_next"])
def test_all_seven_axes_train_as_one_device(model):
    compare_in_process(model)
