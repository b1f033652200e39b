"""Rows of the covering design train as one device does: models with experts.

Each file trains a model on one device once, and so its rows run in one worker.
"""

import numpy as np
import pytest

from tests.parity.comparison import compare_row, references, train_reference
from tests.parity.rows import ROWS

HERE = [row for row in ROWS if row.model not in ("llama", "sinks")]


@pytest.mark.parametrize("name", references(HERE))
def test_one_device_trains_the_model(name):
    for outcome in train_reference(*references(HERE)[name]):
        assert np.all(np.isfinite(outcome.losses))


@pytest.mark.parametrize("row", HERE, ids=lambda row: row.name)
def test_row_equals_one_device(row):
    compare_row(row)
