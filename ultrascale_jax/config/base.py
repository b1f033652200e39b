"""Refuse a setting by one error, which names the field, its value and the fix; and put the home folder for `~`."""

import difflib
import operator
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LARGEST = 2**31 - 1
"""The largest integer of a configuration: sizes, steps and indices are int32."""

FLOATS = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The smallest and the largest positive number of float32, in which a run computes."""

SHOWN = 1000
"""Characters of a value that an error shows."""


class UserError(ValueError):
    """Something the user can mend; commands show its message alone, without a traceback."""

    exit_code = 2
    """Exit code of a script that this error ends."""


def require(ok: bool, name: str, value: object, fix: str) -> None:
    """Raise a `UserError` that names the field, its value and the fix, unless `ok`."""
    if not ok:
        raise UserError(f"{name}={shown(value)}: {fix}")


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return a question for the known name that is most like an unknown one, and a space; empty if none is."""
    near = difflib.get_close_matches(name, choices, n=1)
    return f"did you mean {near[0]}? " if near else ""


def at_home(text: str) -> str:
    """Return a path with the user's home for a `~` at its beginning; also each path of a text as `tokens:~/a,text:~/b`.

    A shell does so only for words that begin with `~`, not in `--log.run-dir=~/x` or between quotes.
    """
    if "~" not in text:
        return text
    begin = r"(^|=|\b(?:hf|tokens|text|topk):)(~[^/]*)"
    return re.sub(begin, lambda match: match[1] + os.path.expanduser(match[2]), text)


def put_home(values: Any, *fields: str) -> None:
    """Put the home folder for `~` in these fields of a frozen dataclass: texts, paths, and tuples of them."""

    def changed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(changed, value))
        return type(value)(at_home(str(value))) if isinstance(value, (str, Path)) else value

    for field in fields:
        object.__setattr__(values, field, changed(getattr(values, field)))


def require_type(name: str, value: object, kind: type, fix: str = "") -> None:
    """Refuse an argument that is not a `kind`; `fix` says how to get one."""
    if not isinstance(value, kind):
        mismatch = f"{name}: must be of type {kind.__name__}, not {type(value).__name__}"
        raise UserError(f"{mismatch}; {fix}" if fix else mismatch)


def whole(name: str, value: Any, least: int = 0) -> int:
    """Return an argument as an integer, also one of NumPy or a scalar array; refuse another, and one below `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UserError(f"{name}={shown(value)}: must be a whole number") from None
    require(number >= least, name, number, f"must be at least {least}")
    return number


def shown(value: object) -> str:
    """Return the value as an error shows it: a number of a million digits and a long list are shortened."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"a number in the {type(value).__name__}, of thousands of digits"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def in_float32(number: float) -> bool:
    """Return whether the size of a number is 0 or between the two `FLOATS`; it is not for infinities and NaN."""
    least, most = FLOATS
    return number == 0 or least <= abs(number) <= most
