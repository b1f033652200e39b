"""Steps that were skipped: what is kept of them, and the end of a run that does nothing else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ultrascale_jax.config import Config, UserError
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.launch.events import Events, to_json
from ultrascale_jax.launch.exit_codes import STOPPED
from ultrascale_jax.launch.run_files import write_atomic
from ultrascale_jax.train_step.loss_scale import LEAST

FILE_NAME = "skipped.json"
"""Written when a run is stopped: the batches of its last skipped steps, by shard and token."""


class Diverged(UserError):
    """`train.max_skipped` steps in a row were skipped: not finite, or spikes."""

    exit_code = STOPPED


FAULTS = {
    "spike": "loss or gradient norm was a spike",
    "not finite": "loss or gradient norm was not finite",
    "update": "the update was not finite",
}
"""Why a step was skipped, by the reason that is on record."""


def reason(values: Mapping[str, Any]) -> str:
    """Why a skipped step with these metrics was skipped: a key of `FAULTS`."""
    if values.get("spike", False):
        return "spike"
    finite = np.isfinite(values["loss"]) and np.isfinite(values["grad_norm"])
    return "update" if finite else "not finite"


def suspicious(values: Mapping[str, np.ndarray]) -> bool:
    """Whether a step with these metrics was skipped, and not because float16 is looking for its loss scale."""
    searching = values.get("loss_scale", LEAST) > LEAST and reason(values) == "not finite"
    return bool(values["skipped"]) and not searching


class Skips:
    """The skipped steps of one run."""

    def __init__(self, cfg: Config, loader: Loader, events: Events, in_a_row: int):
        """`in_a_row`: how many there have been since the last good step."""
        self._cfg, self._loader, self._events = cfg, loader, events
        self.total, self._in_a_row = 0, in_a_row
        self.skipping = False
        """Whether the last step was skipped, so that the state is still that of the step before."""
        self._last: list[dict] = []
        """Those in a row that this process has seen."""

    def read(
        self, step: int, values: Mapping[str, np.ndarray], digest: str, newest: int | None
    ) -> None:
        """Take note of step `step`, on a batch with the hash `digest`, whose metrics are `values`.

        Raises `Diverged`, with `newest`, the newest checkpoint, in its message, where it was one too many.
        """
        self.skipping = bool(values["skipped"])
        if not self.skipping:
            self._in_a_row, self._last = 0, []
            return
        self.total += 1
        if not suspicious(values):
            return
        size = self._cfg.train.global_batch
        row = {
            "step": step,
            "reason": reason(values),
            "loss": float(values["loss"]),
            "grad_norm": float(values["grad_norm"]),
            "batch_hash": digest,
            "rows": [(step - 1) * size, step * size],
        }
        if jax.process_index() == 0:
            self._events.record("skipped", **row)
        self._last.append(row)
        self._in_a_row += 1
        if self._in_a_row >= self._cfg.train.max_skipped:
            raise Diverged(self._stop(step, newest))

    def _stop(self, step: int, newest: int | None) -> str:
        """Write the batches down, and say what happened."""
        path = Path(self._cfg.log.run_dir) / FILE_NAME
        if jax.process_index() == 0:
            rows = [{**row, "places": self._loader.places(row["step"] - 1)} for row in self._last]
            write_atomic(path, ("[\n" + ",\n".join(map(to_json, rows)) + "\n]\n").encode())
        reasons = {row["reason"] for row in self._last}
        fault = " or ".join(FAULTS[reason] for reason in sorted(reasons))
        fix = "Lower optim.lr, or raise optim.warmup_steps"
        if "spike" in reasons:
            fix += f"; or raise watch.spike_sigma={self._cfg.watch.spike_sigma:g}, if the loss has risen for good"
        hashes = ", ".join(row["batch_hash"] for row in self._last)
        return (
            f"{fault} in {self._in_a_row} steps in a row up to step {step} "
            f"(train.max_skipped={self._cfg.train.max_skipped}); newest checkpoint: {newest}; "
            f"hashes of the batches: {hashes}; where they were read is in {path}. {fix}"
        )
