"""What a search may take, or a grid consists of, as words of the command line: `tp=8,pp=1`."""

import math
import re
from typing import Any

from ultrascale_jax.config import SCHEDULES, TrainConfig, require
from ultrascale_jax.plan.search.search_space import FIELDS, STASHES

NAMES = {"schedule": SCHEDULES, "stash": STASHES}
"""Fields whose values are words."""


def parse_choices(name: str, text: str) -> dict[str, tuple[Any, ...]]:
    """`tp=8,pp=1` or `fsdp=1,2,4 remat=none,full` as choices.

    Raises:
      UserError: a field is unknown, given twice, or has a value that it cannot take; the message begins with `name`.
    """
    found: dict[str, tuple[Any, ...]] = {}
    key = ""
    for word in re.split(r"[,\s]+", text.strip()):
        left, equals, right = word.rpartition("=")
        if equals:
            key = left.replace("-", "_")
            require(key in FIELDS, name, text, f"{left!r} is none of {', '.join(FIELDS)}")
            require(key not in found, name, text, f"{key!r} is given twice")
        require(bool(key and right), name, text, "write it as tp=8,pp=1")
        found[key] = (*found.get(key, ()), _value(name, text, key, right))
    return found


def _value(name: str, text: str, field: str, word: str) -> int | str:
    if field == "remat":
        return TrainConfig(remat=word).remat
    if field in NAMES:
        fix = f"{field} is one of {', '.join(NAMES[field])}"
        require(word in NAMES[field], name, text, fix)
        return word
    least, most = (0, 3) if field == "zero" else (1, math.inf)
    fix = (
        f"{field} is a number from 0 to 3" if field == "zero" else f"{field} is a number, 1 or more"
    )
    require(word.isdecimal() and least <= int(word) <= most, name, text, fix)
    return int(word)
