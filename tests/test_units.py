"""Amounts are read alike everywhere."""

import pytest

from ultrascale_jax.units import whole_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("-3", -3),
        ("4_096", 4096),
        ("1e3", 1000),
        ("1.5k", 1500),
        ("4M", 4_000_000),
        ("4Mi", 4 * 2**20),
        ("0.5Gi", 2**29),
        ("15T", 15 * 10**12),
        (" 300b ", 300 * 10**9),
    ],
)
def test_an_amount_is_a_whole_number(text, value):
    assert whole_number(text) == value


@pytest.mark.parametrize(
    "text", ["", "x", "1.5", "1e-1", "1__0", "_1", "1 k", "4MB", "i", "1e999", "nan"]
)
def test_another_text_is_none(text):
    with pytest.raises(ValueError, match="must be an integer, not"):
        whole_number(text)
