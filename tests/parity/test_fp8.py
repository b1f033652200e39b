"""A run in three forms of fp8 whose numbers are those of one device to 1e-5."""

import pytest

from tests.parity.comparison import compare
from tests.parity.fp8 import ROWS, configure


@pytest.mark.parametrize("name", ROWS)
def test_fp8_on_a_mesh_is_fp8_on_one_device(name):
    compare(configure(*ROWS[name]), seeds=(0,))
