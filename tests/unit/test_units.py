"""Amounts are read alike everywhere."""

import pytest

from ultrascale_jax.units import decimal, size, whole_number


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


def test_amounts_are_written_in_the_unit_that_fits():
    sizes = [size(count) for count in (0, 2**19, 2**30 - 2**29, 3 * 2**29, -(2**31))]
    assert sizes == ["0.0 MiB", "0.5 MiB", "512.0 MiB", "1.5 GiB", "-2.0 GiB"]
    assert [decimal(count) for count in (7, 1500, 15e12)] == ["7", "1.5 K", "15 T"]
