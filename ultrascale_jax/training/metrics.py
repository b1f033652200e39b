"""Report a run: rows of `metrics.jsonl`, and lines or a progress bar on the console.

`metrics.jsonl` is the record; docs/metrics.md describes its fields. Each row is one JSON object, written at once and
flushed, and a row of step n describes the n-th optimizer step (n = 1 is the first). A number that is not finite is
written as null, because JSON cannot express it. A run that resumes at step n first drops the rows after n, so that
every step is in the file once. Only process 0 writes.
"""

import contextlib
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ultrascale_jax.config import UserError, require
from ultrascale_jax.health.skipped_steps import FAULTS, reason
from ultrascale_jax.hooks import Hook, Row, Run
from ultrascale_jax.launch.events import say, to_json
from ultrascale_jax.launch.goodput import read_ledger
from ultrascale_jax.launch.run_files import METRICS, write_atomic

COLUMNS = (
    *("step", "loss", "grad_norm", "lr", "tokens"),
    *("tokens_per_s", "step_s", "tflops_per_device", "mfu", "hbm_gib"),
    *("mtp_loss", "hard_loss", "divergence"),
    *("pairs", "reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy"),
    *("logp_chosen", "logp_rejected"),
    *("moe_entropy", "moe_load", "moe_max_load", "loss_scale", "spike", "skipped"),
    *("data_wait_s", "batch_hash", "save_failures"),
)
"""The order of a row's columns; others, as of a user's hook, come after them, and `time` is the last."""


def read_rows(path: Path) -> list[dict]:
    """Read the rows of a `metrics.jsonl`; a last line that a kill cut short is left out."""
    rows = []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError
            rows.append(row)
        except (ValueError, RecursionError):
            if number < len(lines):
                fix = "is not JSON; move the file away to start a new one"
                raise UserError(f"{path}: line {number} {fix}") from None
    return rows


def truncate_rows(path: Path, step: int, *, finished: bool = False) -> list[str]:
    """Drop the rows of `path` after `step`, and a last line that was cut short; return the steps without a row.

    They are ranges, such as `3 to 7`. A run that is `finished` at `step` will be evaluated again, so its evaluation
    there is dropped too.
    """
    if not path.exists():
        return _missing([], step)
    rows = read_rows(path)
    for number, row in enumerate(rows, start=1):
        fix = "holds no number of a step; move the file away to start a new one"
        require(isinstance(row.get("step"), int), f"{path}: row {number}", row, fix)
    rows = [row for row in rows if row["step"] <= step]
    again = [finished and row["step"] == step and "eval_loss" in row for row in rows]
    kept = [json.dumps(row) + "\n" for row, drop in zip(rows, again, strict=True) if not drop]
    write_atomic(path, "".join(kept).encode())
    return _missing(rows, step)


def _missing(rows: list[dict], step: int) -> list[str]:
    """Return the steps from 1 to `step` that none of `rows` describes, as ranges."""
    logged_steps = sorted(
        {row["step"] for row in rows if "eval_loss" not in row and row["step"] > 0}
    )
    pairs = zip([0, *logged_steps], [*logged_steps, step + 1], strict=True)
    holes = [
        (previous + 1, following - 1) for previous, following in pairs if following - previous > 1
    ]
    return [f"{first} to {last}" if first < last else f"{first}" for first, last in holes]


class RunLog(Hook):
    """Writes one run's metrics, on process 0; a context manager."""

    def __init__(
        self, run_dir: Path, *, first_step: int, num_steps: int, console: Console | None = None
    ):
        """Open the files of `run_dir` after step `first_step`, of `num_steps` in all."""
        self._active = jax.process_index() == 0
        self._stack = contextlib.ExitStack()
        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._num_steps = num_steps
        self._last_line = -math.inf
        self._held_back: str | None = None
        self._progress: Progress | None = None
        if not self._active:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        finished = first_step >= num_steps
        missing = truncate_rows(run_dir / METRICS, first_step, finished=finished)
        # Without Python's buffer, which loses rows that it cannot write.
        self._file = self._stack.enter_context(open(run_dir / METRICS, "ab", 0))
        self._waiting, self._full = b"", False
        if self._console.is_terminal:
            words = TextColumn("loss {task.fields[loss]:.4f}"), TimeRemainingColumn()
            self._progress = Progress(
                "train", BarColumn(), MofNCompleteColumn(), *words, console=self._console
            )
            self._stack.enter_context(self._progress)
            self._task = self._progress.add_task(
                "train", total=num_steps, completed=first_step, loss=math.nan
            )
        if missing:
            omitted = f" and {len(missing) - 3} more gaps" if len(missing) > 3 else ""
            where = f"{', '.join(missing[:3])}{omitted}"
            self.note(
                f"{run_dir / METRICS} has no rows of steps {where}: it was cut; all other lines are kept"
            )

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Print the line of the last step, and close the files."""
        self._release()
        self._stack.close()

    def on_start(self, run: Run) -> None:
        run.summary["loss"] = None

    def on_metrics(self, run: Run, row: Row) -> None:
        if not row["skipped"]:
            run.summary["loss"] = row["loss"]
        self.step(
            {name: row[name] for name in COLUMNS if name in row} | row | {"time": time.time()}
        )

    def on_evaluation(self, run: Run, row: Row) -> None:
        self.evaluation(row)

    def on_end(self, run: Run) -> None:
        if run.stopped:
            begun = run.step > run.first_step
            where = f"after step {run.step}" if begun else f"before step {run.step + 1}"
            self.note(f"stopped by SIGTERM {where}; the same command continues")
        if self._active:
            self.note(read_ledger(Path(run.cfg.log.run_dir)).line())

    def step(self, row: Mapping[str, Any]) -> None:
        """Record one optimizer step. The console gets the first, the last, and about one line a second between."""
        if not self._active:
            return
        self._record(row)
        line = _line(row, self._num_steps)
        if self._progress is not None:
            self._progress.update(self._task, completed=row["step"], loss=row["loss"])
        now = time.monotonic()
        quiet = 1.0 if self._progress is None else 30.0
        if now - self._last_line < quiet and not row["skipped"]:
            self._held_back = line
            return
        self._last_line, self._held_back = now, line
        self._release()

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Record `eval_loss`, in nats over `eval_tokens` held-out tokens or of `eval_pairs` pairs, after `step` steps.

        A source with a name has its own loss as `eval_loss_NAME`.
        """
        if not self._active:
            return
        self._record(row)
        pairs = "eval_pairs" in row
        count = (
            f"{row['eval_pairs']:,} held-out pairs"
            if pairs
            else f"{row['eval_tokens']:,} held-out tokens"
        )
        held_out = f"eval loss {row['eval_loss']:.4f} over {count}"
        start = "eval_loss_"
        named = {name: loss for name, loss in row.items() if name.startswith(start)}
        each = ", ".join(f"{name.removeprefix(start)} {loss:.4f}" for name, loss in named.items())
        each = each and f": {each}"
        if pairs:
            margin, accuracy = row["eval_reward_margin"], row["eval_reward_accuracy"]
            each += f"; reward margin {margin:.3f}, accuracy {accuracy:.1%}"
        self.note(f"step {row['step']}/{self._num_steps}  {held_out}{each}")

    def note(self, text: str) -> None:
        """Print one line, after that of the newest step."""
        if self._active:
            self._release()
            self._print(text)

    def _release(self) -> None:
        """Print the newest step's line if it was held back."""
        if self._held_back is not None:
            self._print(self._held_back)
            self._held_back = None

    def _print(self, text: str) -> None:
        if self._console.is_terminal:
            # Above the progress bar.
            self._console.print(text, markup=False)
        else:
            say(text, self._console.file)

    def _record(self, row: Mapping[str, Any]) -> None:
        self._waiting += (to_json(row) + "\n").encode()
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self._full = False
        except OSError as error:
            # A full disk stops no training: the rows wait until there is room.
            if not self._full:
                self._full = True
                self.note(f"metrics wait to be written to {self._file.name}: {error.strerror}")


def _line(row: Mapping[str, Any], num_steps: int) -> str:
    """Format a row as a line for people."""
    parts = [
        f"step {row['step']}/{num_steps}",
        f"loss {row['loss']:.4f}",
        f"grad {row['grad_norm']:.3f}",
        f"lr {row['lr']:.2e}",
        f"{row['tokens_per_s']:,.0f} tok/s",
        f"{row['step_s']:.3f} s",
    ]
    if row.get("mfu") is not None:
        parts.append(f"MFU {row['mfu']:.1%}")
    if "reward_margin" in row:
        parts.append(f"reward margin {row['reward_margin']:.3f}")
        parts.append(f"accuracy {row['reward_accuracy']:.1%}")
    if row.get("moe_max_load"):
        parts.append(f"busiest expert {row['moe_max_load']:.2f}x")
    if row.get("hbm_gib"):
        parts.append(f"{row['hbm_gib']:.1f} GiB")
    if row["skipped"]:
        scale = row.get("loss_scale")
        at = "" if scale is None else f" at loss scale {scale:g}"
        parts.append(f"SKIPPED: {FAULTS[reason(row)]}{at}")
    return "  ".join(parts)
