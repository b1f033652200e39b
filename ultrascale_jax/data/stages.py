"""Stages of `data.source` as one text: `FIRST; AT: NEXT; AT: NEXT`.

AT is a step (`2000`: the stage begins after 2,000 steps) or, with a point, a share of the run's steps (`0.8`).
"""

import re
from dataclasses import dataclass

from ultrascale_jax.config.base import LARGEST, require

BORDER = re.compile(r"\s*;\s*(?=[\d.]+\s*:)")
"""Border of two stages; another `;` is a part of a text, as of a path."""

FORM = "write stages as FIRST; AT: NEXT, where AT is a step (2000) or a share of the run (0.8)"


@dataclass(frozen=True)
class Stage:
    """One stage, as its text says it."""

    at: str
    """Step or share at which it begins; empty for the first."""
    text: str
    """The value from there on."""

    @property
    def is_share(self) -> bool:
        """Return whether it begins at a share of the run's steps."""
        return "." in self.at


def parse_stages(name: str, text: str) -> tuple[Stage, ...]:
    """Read the stages of the field `name`. Raises `UserError` for a text of another form."""
    first, *later_parts = BORDER.split(text.strip())
    stages = [Stage("", first)]
    for part in later_parts:
        at, _, value = part.partition(":")
        sound = re.fullmatch(r"[1-9]\d{0,9}|0?\.\d+", at.strip()) is not None
        require(sound and value.strip() != "", name, text, FORM)
        stages.append(Stage(at.strip(), value.strip()))
    return tuple(stages)


def begins(name: str, text: str, stages: tuple[Stage, ...], steps: int | None) -> tuple[int, ...]:
    """Return the steps that are done before each stage begins, of a run of `steps` steps, 0 for the first.

    Raises `UserError` unless they ascend, or if a stage begins at a share of an unknown number of `steps`.
    """
    first_steps = [0]
    for stage in stages[1:]:
        fix = (
            "a stage begins at a share of the run, so its number of steps must be known; give steps"
        )
        require(not stage.is_share or steps is not None, name, text, fix)
        at = round(float(stage.at) * (steps or 0)) if stage.is_share else int(stage.at)
        fix = f"the stage at {stage.at} would begin after {at} steps, the one before it after {first_steps[-1]}; {FORM}"
        require(first_steps[-1] < at <= LARGEST, name, text, fix)
        first_steps.append(at)
    return tuple(first_steps)
