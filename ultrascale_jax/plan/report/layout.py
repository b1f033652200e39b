"""Parts of the tables, lines and figures of answers."""

import textwrap
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ultrascale_jax.plan.hardware import Gpu
from ultrascale_jax.units import GIB


def table(words: Sequence[str], numbers: Sequence[str], last_words: Sequence[str] = ()) -> Table:
    """Return an empty table: columns of `words`, of `numbers`, which are aligned right, and of `last_words`."""
    made = Table(*words)
    for name in numbers:
        made.add_column(name, justify="right")
    for name in last_words:
        made.add_column(name)
    return made


def line(text: str) -> Text:
    """Return one line that is not wrapped in a narrow terminal, and in which nothing is markup."""
    return Text(text, no_wrap=True, overflow="ignore")


def wrap(text: str, width: int = 16) -> str:
    """Break `text` into lines for a place under an axis of a figure."""
    return "\n".join(textwrap.wrap(text, width, break_long_words=False))


def limit(gpu: Gpu) -> dict[str, Any]:
    """Return the line of a GPU's usable memory, for a figure in GiB."""
    gib = gpu.usable_bytes / GIB
    return {"limit": gib, "limit_name": f"usable on {gpu.name}: {gib:.0f} GiB"}
