"""Pipelines of these tests are one loop, but for a row of each schedule (`IN_SEGMENTS` of rows.py)."""

import pytest

from tests.parity.comparison import loops


@pytest.fixture(scope="module", autouse=True)
def pipelines_are_one_loop():
    with loops():
        yield
