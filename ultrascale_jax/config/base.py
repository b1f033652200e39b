"""How a setting is refused: one error that names the field, its value and the fix."""

from typing import Literal

Implementation = Literal["auto", "mosaic", "xla"]
"""The program that computes a part: our kernel, XLA's own, or the one that is known to be faster."""


class UserError(ValueError):
    """Something the user can mend; scripts show its message alone, without a traceback."""

    exit_code = 2
    """What a script that ends for this reason returns."""


def require(ok: bool, name: str, value: object, fix: str) -> None:
    """Raise a `UserError` that names the field, its value and the fix, unless `ok`."""
    if not ok:
        raise UserError(f"{name}={value!r}: {fix}")


def require_at_most(maximum: int, section: str, values: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(values, name)
        require(value <= maximum, f"{section}.{name}", value, f"must be at most {maximum}")


def require_at_least(minimum: int, section: str, values: object, names: tuple[str, ...]) -> None:
    fix = f"must be at least {minimum}" if minimum else "must not be negative"
    for name in names:
        value = getattr(values, name)
        require(value >= minimum, f"{section}.{name}", value, fix)
