"""The pipeline schedule of a run."""

import math
from dataclasses import dataclass
from typing import Literal

from ultrascale_jax.config.base import check_choices, put_home, require, require_at_least

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
class PipelineConfig:
    """Pipeline schedule of the micro-batches (`train.microbatches`); without effect if mesh.pp is 1."""

    schedule: str = "1f1b"
    """`afab`, `1f1b`, `interleaved`, `zb_uniform`, `zb_h1`, `zb_v`, `dualpipe_v`, or your own table `FILE.csv`."""
    virtual: int = 0
    """Stages of one rank; 0 is the schedule's own: 2 for interleaved, zb_v and dualpipe_v, 1 for the others."""
    stash: Literal["residuals", "input"] = "residuals"
    """Kept from forward to backward: what `train.remat` keeps of each layer, or the stage's input alone."""

    def __post_init__(self):
        put_home(self, "schedule")
        name, from_file = self.schedule, self.from_file
        fix = f"must be one of {', '.join(SCHEDULES)}, or a table FILE.csv"
        require(name in SCHEDULES or from_file, "pp.schedule", name, fix)
        check_choices("pp", self)
        require_at_least(0, "pp", self, ("virtual",))
        least, most = STAGES_PER_RANK.get(name, (0, 0))
        fix = f"{name} has {least}{'' if least == most else ' or more'}; or 0"
        if from_file:
            fix = f"the table {name} says it itself; use 0"
        require(not self.virtual or least <= self.virtual <= most, "pp.virtual", self.virtual, fix)

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
        name = self.schedule
        if name in GROUPED and self.stages_per_rank > 1:
            fix = f"must be at least {ranks} (mesh.pp) for {name}"
            require(microbatches >= ranks, "train.microbatches", microbatches, fix)
        fix = f"dualpipe_v wants at least 2*mesh.pp={2 * ranks}"
        enough = name != "dualpipe_v" or microbatches >= 2 * ranks
        require(enough, "train.microbatches", microbatches, fix)
