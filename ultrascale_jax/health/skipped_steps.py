"""Record skipped steps, and end a run that does nothing else."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ultrascale_jax.config import UserError
from ultrascale_jax.data.loader import Loader
from ultrascale_jax.health.nonfinite import find_nonfinite
from ultrascale_jax.hooks import Hook, Row, Run
from ultrascale_jax.launch.events import to_json
from ultrascale_jax.launch.exit_codes import STOPPED
from ultrascale_jax.launch.run_files import write_atomic
from ultrascale_jax.train_step.loss_scale import LEAST

FILE_NAME = "skipped.json"
"""Written when a run is stopped: the batches of its last skipped steps, by shard and token."""


MOST_IN_A_ROW = 10


class Diverged(UserError):
    """`MOST_IN_A_ROW` steps were skipped: not finite, spikes, or without targets."""

    exit_code = STOPPED


FAULTS = {
    "spike": "loss or gradient norm was a spike",
    "not finite": "loss or gradient norm was not finite",
    "update": "the update was not finite",
    "no targets": "the batch had no targets",
}
"""Why a step was skipped, by the reason that is on record."""


def reason(values: Mapping[str, Any]) -> str:
    """Return why a step with these metrics was skipped: a key of `FAULTS`."""
    if not values.get("pairs", values["tokens"]):
        return "no targets"
    if values.get("spike", False):
        return "spike"
    finite = np.isfinite(values["loss"]) and np.isfinite(values["grad_norm"])
    return "update" if finite else "not finite"


def suspicious(values: Mapping[str, Any]) -> bool:
    """Return whether a step with these metrics was skipped, and not because float16 is looking for its loss scale."""
    searching = values.get("loss_scale", LEAST) > LEAST and reason(values) == "not finite"
    return bool(values["skipped"]) and not searching


class SkippedSteps(Hook):
    """Counts skipped steps, records them, and ends a run with `MOST_IN_A_ROW` of them."""

    def __init__(self, loader: Loader, newest: Callable[[], int | None]):
        """Take from `newest` the newest checkpoint's step."""
        self._loader, self._newest = loader, newest
        self._in_a_row = 0
        self._last: list[dict] = []
        """Skipped steps in a row that this process has seen."""

    def on_start(self, run: Run) -> None:
        self._in_a_row = int(run.state.skipped_in_a_row)
        run.summary["skipped"] = 0

    def on_metrics(self, run: Run, row: Row) -> None:
        """Raise `Diverged` if this step was one too many to skip."""
        if not row["skipped"]:
            self._in_a_row, self._last = 0, []
            return
        run.summary["skipped"] += 1
        if not suspicious(row):
            return
        step, batches = row["step"], run.cfg.train.batches
        skipped = {
            "step": step,
            "reason": reason(row),
            **{name: row[name] for name in ("loss", "grad_norm", "batch_hash")},
            "rows": [batches.before(step - 1), batches.before(step)],
        }
        if jax.process_index() == 0:
            run.events.record("skipped", **skipped)
        self._last.append(skipped)
        self._in_a_row += 1
        if self._in_a_row >= MOST_IN_A_ROW:
            raise Diverged(self._end(run, step))

    def _end(self, run: Run, step: int) -> str:
        """Record the skipped batches, and print the reason."""
        path = Path(run.cfg.log.run_dir) / FILE_NAME
        if jax.process_index() == 0:
            rows = [{**row, "places": self._loader.places(row["step"] - 1)} for row in self._last]
            write_atomic(path, ("[\n" + ",\n".join(map(to_json, rows)) + "\n]\n").encode())
        reasons = {row["reason"] for row in self._last}
        fault = " or ".join(FAULTS[reason] for reason in sorted(reasons))
        fix = "Lower optim.lr, or raise optim.warmup_steps"
        if reasons == {"no targets"}:
            fix = "Give data.source documents of which the loss counts some tokens"
        if "spike" in reasons:
            fix += f"; or raise watch.spike_sigma={run.cfg.watch.spike_sigma:g}, if the loss has risen for good"
        hashes = ", ".join(row["batch_hash"] for row in self._last)
        return (
            f"{fault} in {self._in_a_row} steps in a row up to step {step}{self._place(run)}; newest checkpoint: "
            f"{self._newest()}; hashes of the batches: {hashes}; where they were read is in {path}. {fix}"
        )

    def _place(self, run: Run) -> str:
        """Say where the last step was not finite, if it was not."""
        last = self._last[-1]
        if last["reason"] != "not finite":
            return ""
        cfg = run.cfg.of_batch(last["rows"][1] - last["rows"][0])
        batches = self._loader.device_batches(run.mesh, last["step"] - 1)
        with run.watch.section("compile"), contextlib.closing(batches):
            jax.block_until_ready(run.state)
            try:
                place = find_nonfinite(cfg, run.state, next(batches)[1])
            except jax.errors.JaxRuntimeError as error:  # no memory is left, say
                place = f"at a place that was not found: {str(error).splitlines()[0]}"
        return f", first {place}"
