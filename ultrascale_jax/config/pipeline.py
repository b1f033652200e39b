"""The pipeline schedule of a run."""

import math
from dataclasses import dataclass
from typing import Literal

from ultrascale_jax.config.base import put_home
from ultrascale_jax.config.section import Natural, Section, refuse

Stash = Literal["residuals", "input"]

STAGES_PER_RANK = {
    "afab": (1, 1),
    "1f1b": (1, 1),
    "interleaved": (2, math.inf),
    "zb_uniform": (1, math.inf),
    "zb_h1": (1, 1),
    "zb_v": (2, 2),
    "dualpipe_v": (2, 2),
}
"""Pipeline schedules that have a name, with the least and the most stages of a rank; by default a rank has the least.
`parallel/pipeline/schedules.py` makes the schedules."""

SCHEDULES = tuple(STAGES_PER_RANK)

GROUPED = tuple(name for name, (_, most) in STAGES_PER_RANK.items() if most == math.inf)
"""Schedules that send micro-batches through their stages in groups; only their `virtual` is free."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Section, name="pp"):
    """Pipeline schedule of the micro-batches (`train.microbatches`); without effect if mesh.pp is 1."""

    schedule: str = "1f1b"
    """`afab`, `1f1b`, `interleaved`, `zb_uniform`, `zb_h1`, `zb_v`, `dualpipe_v`, or your own table `FILE.csv`."""
    virtual: Natural = 0
    """Stages of one rank; 0 is the schedule's own: 2 for interleaved, zb_v and dualpipe_v, 1 for the others."""
    stash: Stash = "residuals"
    """Kept from forward to backward: what `train.remat` keeps of each layer, or the stage's input alone."""

    def __post_init__(self):
        put_home(self, "schedule")
        super().__post_init__()
        least, most = STAGES_PER_RANK.get(self.schedule, (0, 0))
        if self.schedule not in SCHEDULES and not self.from_file:
            fix = f"must be one of {', '.join(SCHEDULES)}, or a table FILE.csv"
            self.refuse("schedule", fix)
        if self.virtual and self.from_file:
            self.refuse("virtual", f"the table {self.schedule} says it itself; use 0")
        if self.virtual and not least <= self.virtual <= most:
            instead = ", or take interleaved" if most == 1 else ""
            count = "one stage" if most == 1 else f"{least} stages"
            number = f"{count} a rank{'' if least == most else ', or more'}"
            self.refuse("virtual", f"{self.schedule} has {number}; leave it out{instead}")

    @property
    def from_file(self) -> bool:
        """Return whether the schedule is a table of the user's."""
        return self.schedule.lower().endswith(".csv")

    @property
    def stages_per_rank(self) -> int:
        """`virtual`, or the schedule's own number; a table brings its own."""
        return self.virtual or int(STAGES_PER_RANK.get(self.schedule, (1, 1))[0])

    def check(self, ranks: int, microbatches: int) -> None:
        """Refuse the numbers of ranks and micro-batches for which the schedule does not exist."""
        name, count = self.schedule, microbatches
        if name in GROUPED and self.stages_per_rank > 1 and count < ranks:
            fix = f"must be at least {ranks} (mesh.pp) for {name}"
            refuse("train", "microbatches", count, fix)
        if name == "dualpipe_v" and count < 2 * ranks:
            fix = f"dualpipe_v wants at least 2*mesh.pp={2 * ranks}"
            refuse("train", "microbatches", count, fix)
