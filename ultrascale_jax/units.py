"""Amounts as people write them: `4M` is 4,000,000 and `4Mi` is 4 * 2^20, on every option and in every command."""

import re
from fractions import Fraction

SUFFIXES = {
    **{"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12},
    **{"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40},
}
"""Factors by suffix, in capital letters."""

NUMBER = re.compile(r"([+-]?\d+(?:_\d+)*(?:\.\d+)?(?:e[+-]?\d\d?)?)([kmgbt]?i?)", re.IGNORECASE)


def whole_number(text: str) -> int:
    """Return the integer that `text` writes, as 4096, 4_096, 1e3, 1.5k, 4M or 4Mi. Raises `ValueError`."""
    match = NUMBER.fullmatch(text.strip())
    factor = SUFFIXES.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"must be an integer, not {text!r}")
    value = Fraction(match[1]) * factor
    if value.denominator != 1:
        raise ValueError(f"must be an integer, not {text!r}")
    return value.numerator
