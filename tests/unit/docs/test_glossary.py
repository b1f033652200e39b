"""The glossary: in the order of the alphabet, and complete for what users write on a command line."""

import re
from pathlib import Path

from ultrascale_jax.config import AXES, FP8, REMAT_POLICIES, SCHEDULES

PAGE = Path(__file__).parents[3] / "docs" / "course" / "glossary.md"


def entries() -> dict[str, str]:
    """Return the terms of the page, and the text of each, on one line."""
    found = re.findall(r"^\* \*\*(.+?)\*\*: (.*(?:\n  .*)*)", PAGE.read_text(), re.MULTILINE)
    assert len({term for term, _ in found}) == len(found)
    return {term: " ".join(text.split()) for term, text in found}


def test_every_axis_schedule_and_policy_is_explained():
    text = " ".join(f"{term}: {explained}" for term, explained in entries().items()).lower()
    words = {*AXES, *SCHEDULES, *REMAT_POLICIES, *FP8, "bf16", "fp16", "fp32"}
    assert [word for word in words if not re.search(rf"\b{word}\b", text)] == []
