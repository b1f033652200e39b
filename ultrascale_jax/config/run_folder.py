"""The folder of a run, its checkpoints and its trackers."""

import re
from dataclasses import dataclass
from typing import Literal

from ultrascale_jax.config.base import put_home
from ultrascale_jax.config.section import Count, Natural, Section

Tracker = Literal["auto", "none", "tensorboard", "wandb", "mlflow"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section, name="checkpoint"):
    """Steps to save, and the checkpoint to resume from."""

    every: Natural = 1000
    """Steps between checkpoints; 0 saves only after the last step."""
    keep: Count = 3
    """Newest checkpoints to keep; those before a row of skipped steps stay until a good step is saved."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Continue from the newest checkpoint: if there is one, never, or else fail."""
    branch_from: str = ""
    """Checkpoint of another run, `RUN_DIR[@STEP]`, to go on from where this run has none: with its optimizer, step and
    place in the data."""
    allow_change: tuple[str, ...] = ()
    """Fields, as `data.seq_len`, that a resumed run may change though its numbers change with them.

    `data` means the tokens themselves."""
    store: str = ""
    """Object storage that gets a copy of every checkpoint, as `s3://BUCKET/RUN` or `gs://BUCKET/RUN`; a run whose disk
    has none continues there."""

    def __post_init__(self):
        put_home(self, "branch_from")
        super().__post_init__()
        if self.store and not re.fullmatch(r"[a-z][a-z0-9+.-]+://[^/]+/.*[^/]", self.store):
            self.refuse(
                "store", "must be a folder in a bucket, as s3://BUCKET/RUN or gs://BUCKET/RUN"
            )


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section, name="log"):
    """Folder of a run, and its trackers."""

    run_dir: str = "out/run"
    """Folder that holds everything a run writes."""
    to: tuple[Tracker, ...] = ("auto",)
    """Trackers that get the metrics too; `auto` is TensorBoard where the extra `tb` is installed."""

    def __post_init__(self):
        put_home(self, "run_dir")
        super().__post_init__()
        if not self.run_dir.strip() or "\0" in self.run_dir:
            self.refuse("run_dir", "must be a path")
        if "://" in self.run_dir:
            copies = f"copies of the checkpoints go to --checkpoint.store {self.run_dir}"
            self.refuse("run_dir", f"must be a folder on a disk; {copies}")
        if len(self.to) != len({*self.to}) or (len(self.to) > 1 and {"auto", "none"} & {*self.to}):
            self.refuse("to", "must be auto, none, or other trackers, each once")
