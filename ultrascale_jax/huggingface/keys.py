"""Read values of `config.json`, which is somebody else's text: each is checked, and named if it is wrong."""

from collections.abc import Mapping
from typing import Any, cast

from ultrascale_jax.config import LARGEST, in_float32, require


def integer(
    raw: Mapping[str, Any],
    key: str,
    default: int | None = None,
    null: int | None = None,
    minimum: int = 1,
) -> int:
    """Return an integer from `minimum` on; `default` for an absent key, `null` for a null value."""
    value = raw.get(key, default)
    value = null if value is None else value
    whole = isinstance(value, int) and not isinstance(value, bool)
    good = whole and minimum <= value <= LARGEST
    kind = "a positive integer" if minimum == 1 else f"an integer from {minimum} on"
    fix = f"must be {kind}, at most {LARGEST}"
    require(good, key, value, fix)
    return cast(int, value)


def number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a positive number; `default` for an absent key."""
    value = raw.get(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    good = is_number and value > 0 and in_float32(value)
    require(good, key, value, "must be a positive number that float32 holds")
    return float(value)


def flag(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return true or false; `default` for an absent key."""
    value = raw.get(key, default)
    require(isinstance(value, bool), key, value, "must be true or false")
    return value
