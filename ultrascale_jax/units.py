"""Amounts as people write and read them: `4M` is 4,000,000, `4Mi` is 4 * 2^20, and memory is in MiB and GiB."""

import re

MIB, GIB = 2**20, 2**30

SUFFIXES = {
    **{"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12},
    **{"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40},
}
"""Factors by suffix, in capital letters."""

NUMBER = re.compile(r"([+-]?\d+(?:_\d+)*(?:\.\d+)?(?:e[+-]?\d\d?)?)([kmgbt]?i?)", re.IGNORECASE)


def whole_number(text: str) -> int:
    """Return the integer that `text` writes, as 4096, 4_096, 1e3, 1.5k, 4M or 4Mi. Raises `ValueError`."""
    from fractions import Fraction  # which takes 2% of a start

    match = NUMBER.fullmatch(text.strip())
    factor = SUFFIXES.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"must be an integer, not {text!r}")
    value = Fraction(match[1]) * factor
    if value.denominator != 1:
        raise ValueError(f"must be an integer, not {text!r}")
    return value.numerator


def byte_unit(largest: float) -> tuple[str, int]:
    """Return the unit for sizes up to `largest` bytes, and its bytes."""
    return ("GiB", GIB) if abs(largest) >= GIB else ("MiB", MIB)


def size(count: float) -> str:
    """Return a number of bytes as text: `1.5 GiB`, `0.3 MiB`."""
    unit, unit_bytes = byte_unit(count)
    return f"{count / unit_bytes:.1f} {unit}"


def counted(count: int, noun: str, nouns: str = "") -> str:
    """Return a number and its noun, `nouns` where that is not one with an s: `1 part`, `2,048 parts`, `2 processes`."""
    return f"{count:,} {noun if count == 1 else nouns or f'{noun}s'}"


def rounded(number: float) -> str:
    """Return a number as text with three digits, or as a whole number from 100 on: `0.0923`, `71.2`, `27,338`."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:,.3g}"


def decimal(count: float) -> str:
    """Return a count in powers of 1,000: `15 T`, `1.5 M`, `7`."""
    unit = max((u for u in "KMBT" if count >= SUFFIXES[u]), key=SUFFIXES.__getitem__, default="")
    return f"{count / SUFFIXES[unit]:.3g} {unit}".strip()


def number(value: float) -> str:
    """Return a number as a figure and a table of operations show it: up to two decimals, thousands separated."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return f"{value:.{digits}f}" if size >= 0.01 else f"{value:.2g}"


def precise(value: float | None) -> str:
    """Return a result as text: a count whole, another number with four decimals, `-` for none."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"


def milliseconds(seconds: float | None) -> str:
    """Return a time in milliseconds without its unit, `-` for none."""
    return "-" if seconds is None else f"{seconds * 1e3:,.2f}"
