"""Runs in fp8 with pipelines, experts and multi-token prediction whose numbers are those of one device to 1e-5."""

import pytest

from tests.parity.comparison import compare
from tests.parity.fp8 import NIGHTLY_ROWS, configure


@pytest.mark.parametrize("name", NIGHTLY_ROWS)
def test_fp8_on_a_mesh_is_fp8_on_one_device(name):
    compare(configure(*NIGHTLY_ROWS[name]), evaluates=True, seeds=(0,))
