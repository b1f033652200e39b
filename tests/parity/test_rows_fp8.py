"""Rows of the covering design in fp8 train as one device does.

Rows in fp8 have a file of their own, for another worker; each file trains a model on one device once.
"""

import numpy as np
import pytest

from tests.parity.comparison import compare_row, references, train_reference
from tests.parity.rows import ROWS
from ultrascale_jax.config import FP8

HERE = [row for row in ROWS if row.precision in FP8]


@pytest.mark.parametrize("name", references(HERE))
def test_one_device_trains_the_model(name):
    for outcome in train_reference(*references(HERE)[name]):
        assert np.all(np.isfinite(outcome.losses))


@pytest.mark.parametrize("row", HERE, ids=lambda row: row.name)
def test_row_equals_one_device(row):
    compare_row(row)
