"""Tests of commands read stderr whole, on machines of any speed."""

import pytest

from ultrascale_jax.cli import output


@pytest.fixture(autouse=True)
def nothing_is_told_of_slow_work(monkeypatch):
    monkeypatch.setattr(output, "FIRST_S", 3600)
