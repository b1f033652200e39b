"""The folder of a run, its checkpoints and its trackers."""

import re
from dataclasses import dataclass

from ultrascale_jax.config.base import put_home, require, require_at_least

TRACKERS = ("tensorboard", "wandb", "mlflow")
"""Trackers that `log.to` may name."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Steps to save, and the checkpoint to resume from."""

    every: int = 1000
    """Steps between checkpoints; 0 saves only after the last step."""
    keep: int = 3
    """Newest checkpoints to keep; those before a row of skipped steps stay until a good step is saved."""
    resume: str = "auto"
    """Continue from the newest checkpoint: `auto`, if there is one; `never`; `must`, or fail. `from:RUN_DIR[@STEP]`: if
    there is none, branch off that run's checkpoint, with its optimizer, step and place in the data."""
    allow_change: tuple[str, ...] = ()
    """Fields, as `data.seq_len`, that a resumed run may change though its numbers change with them.

    `data` stands for the tokens themselves."""
    store: str = ""
    """Object storage that gets a copy of every checkpoint, as `s3://BUCKET/RUN` or `gs://BUCKET/RUN`; a run whose disk
    has none goes on from there."""

    def __post_init__(self):
        put_home(self, "resume")
        known = re.fullmatch(r"auto|never|must|from:.+", self.resume, re.DOTALL) is not None
        fix = "must be auto, never, must or from:RUN_DIR[@STEP]"
        require(known, "checkpoint.resume", self.resume, fix)
        fix = "must be a folder in a bucket, as s3://BUCKET/RUN or gs://BUCKET/RUN"
        place = re.fullmatch(r"[a-z][a-z0-9+.-]+://[^/]+/.*[^/]", self.store)
        require(not self.store or place is not None, "checkpoint.store", self.store, fix)
        require_at_least(0, "checkpoint", self, ("every",))
        require_at_least(1, "checkpoint", self, ("keep",))


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Folder of a run, and its trackers."""

    run_dir: str = "out/run"
    """Folder that holds everything a run writes."""
    to: str = "auto"
    """Trackers that get the metrics too: some of `tensorboard,wandb,mlflow`, joined by commas; `none`; or `auto`:
    TensorBoard where the extra `tb` is installed."""

    def __post_init__(self):
        put_home(self, "run_dir")
        usable = self.run_dir.strip() != "" and "\0" not in self.run_dir
        require(usable, "log.run_dir", self.run_dir, "must be a path")
        fix = f"must be a folder on a disk; copies of the checkpoints go to --checkpoint.store {self.run_dir}"
        require("://" not in self.run_dir, "log.run_dir", self.run_dir, fix)
        names = self.to.split(",")
        known = len(set(names)) == len(names) and set(names) <= set(TRACKERS)
        fix = f"must be auto, none, or some of {', '.join(TRACKERS)}, joined by commas"
        require(self.to in ("auto", "none") or known, "log.to", self.to, fix)
