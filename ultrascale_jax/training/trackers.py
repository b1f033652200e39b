"""Send the numbers of a run to the trackers that `log.to` names: TensorBoard, Weights & Biases, MLflow.

A tracker gets the numbers of every row of `metrics.jsonl`, in a thread of its own, so that a slow server delays no
step. One that fails is left out until the next start, with one warning. Only process 0 logs. `RUN_DIR/trackers.json`
holds the runs' ids: a run that resumes from a checkpoint continues them.

To add a tracker, write a class with the constructor and the methods of `Tracker`, and add it to `TRACKERS`.
"""

import dataclasses
import importlib.util
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax

from ultrascale_jax.checkpoint.run_metadata import fields
from ultrascale_jax.config import Config, require
from ultrascale_jax.hooks import Hook, Row, Run
from ultrascale_jax.launch.events import is_number, parse_object, say
from ultrascale_jax.launch.run_files import write_atomic

PROJECT = "ultrascale_jax"
"""Default name of the W&B project and of the MLflow experiment."""

IDS = "trackers.json"
"""File in the run directory with the id of the run at each tracker, by the tracker's name."""

CLOSE_S, FAILED_S = 45.0, 5.0
"""Seconds that trackers may take to send all rows at the end of a run, and of a run that an exception ends."""


class Tracker(Protocol):
    """One run at one tracker; all calls come from one thread and may raise.

    The constructor takes the configuration, the steps that the run has done, and the id of the tracker's run to
    continue, none to begin a new one.
    """

    module: str
    extra: str
    """The package that it imports, and the extra of this package that brings it."""
    run_id: str | None
    """Id under which a resumed run continues it; none if it needs none."""

    def __init__(self, cfg: Config, step: int, run_id: str | None): ...

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send finite numbers by name, of optimizer step `step`; steps do not decrease."""

    def close(self, *, failed: bool) -> None:
        """Send all rows and end the run; `failed`: by an exception."""


class TensorBoard:
    """Writes to `RUN_DIR/tensorboard`, a file for each start.

    tensorboardX's `SummaryWriter` writes in a thread, so that a full disk raises nothing before the end of the run;
    its `EventsWriter` writes at once.
    """

    module, extra = "tensorboardX", "tb"
    run_id: str | None = None

    def __init__(self, cfg: Config, step: int, run_id: str | None):
        """Open a file; a reader hides the events after `step` in earlier ones."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2
        from tensorboardX.summary import scalar

        proto: Any = event_pb2  # its classes are made at run time
        self._event, self._scalar = proto.Event, scalar
        folder = Path(cfg.log.run_dir).absolute() / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # Its names have whole seconds, and it truncates a file that exists: no two starts may choose one name.
        self._events = EventsWriter(f"{folder}/events", f".{os.getpid()}.{time.time_ns()}")
        self._write(step=step + 1, session_log={"status": "START"})

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._write(step=step, summary=self._scalar(name, value))
        self._events.flush()

    def close(self, *, failed: bool) -> None:
        self._events.close()

    def _write(self, **fields: Any) -> None:
        self._events.write_event(self._event(wall_time=time.time(), **fields))


class WandB:
    """Logs to Weights & Biases, whose environment variables (`WANDB_MODE`, `WANDB_PROJECT`) apply."""

    module, extra = "wandb", "wandb"

    def __init__(self, cfg: Config, step: int, run_id: str | None):
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", Path(cfg.log.run_dir).name),
            dir=cfg.log.run_dir,
            id=run_id,
            resume="allow",
            reinit="create_new",
            config=dataclasses.asdict(cfg),
            allow_val_change=True,
            settings=wandb.Settings(console="off"),
        )
        self.run_id: str | None = self._run.id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    """Logs to the MLflow server or store of `MLFLOW_TRACKING_URI`, in the experiment `MLFLOW_EXPERIMENT_NAME`."""

    module, extra = "mlflow", "mlflow"

    def __init__(self, cfg: Config, step: int, run_id: str | None):
        import mlflow

        self._mlflow = mlflow
        if run_id is None:
            mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        run = mlflow.start_run(run_id, run_name=Path(cfg.log.run_dir).name)
        self.run_id: str | None = run.info.run_id
        if run_id is None:
            mlflow.log_params(fields(cfg))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step)

    def close(self, *, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
"""Trackers by their names in `log.to`."""


def chosen(to: tuple[str, ...]) -> tuple[str, ...]:
    """Return the trackers of `log.to`, in its order. Raises `UserError` for a missing package or address."""
    installed = {name for name, kind in TRACKERS.items() if importlib.util.find_spec(kind.module)}
    if to == ("auto",):
        return ("tensorboard",) if "tensorboard" in installed else ()
    names = () if to == ("none",) else to
    for name in names:
        fix = f"needs a package: pip install 'ultrascale_jax[{TRACKERS[name].extra}]'"
        require(name in installed, "log.to", name, fix)
    fix = "set MLFLOW_TRACKING_URI to the address of your server, such as http://localhost:5000"
    address = os.environ.get("MLFLOW_TRACKING_URI", "").strip()
    require("mlflow" not in names or address != "", "log.to", "mlflow", fix)
    return names


class Trackers(Hook):
    """Sends complete rows to the trackers of a run; a context manager."""

    def __init__(self, cfg: Config, first_step: int):
        """Prepare the trackers of `cfg` after step `first_step`. Raises as `chosen`."""
        names = chosen(cfg.log.to)
        self._names = names if jax.process_index() == 0 else ()
        self._cfg, self._step = cfg, first_step
        self._ids: dict[str, Any] = {}
        self._ids_file = Path(cfg.log.run_dir) / IDS
        self._ids_lock = threading.Lock()
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Trackers":
        if self._names and self._step and self._ids_file.exists():
            self._ids = parse_object(self._ids_file.read_bytes())
        self._workers = [_Worker(name, self._open) for name in self._names]
        return self

    def __exit__(self, *raised: object) -> None:
        self._close(failed=raised[0] is not None)

    def on_metrics(self, run: Run, row: Row) -> None:
        numbers = {
            name: float(value)
            for name, value in row.items()
            if (isinstance(value, bool) or is_number(value)) and name not in ("step", "time")
        }
        for worker in self._workers:
            if worker.is_alive():
                worker.queue.put((row["step"], numbers))

    on_evaluation = on_metrics

    def on_end(self, run: Run) -> None:
        with run.pause("end"):  # `watch.hang_s` is not for this section
            self._close(failed=False)

    def _open(self, name: str) -> Tracker:
        """Open a tracker and write down the id of its run; called from the workers' threads."""
        run_id = self._ids.get(name)
        tracker = TRACKERS[name](self._cfg, self._step, run_id if isinstance(run_id, str) else None)
        if tracker.run_id is not None:
            with self._ids_lock:
                self._ids[name] = tracker.run_id
                write_atomic(self._ids_file, json.dumps(self._ids).encode())
        return tracker

    def _close(self, *, failed: bool) -> None:
        """Wait for the rows that are left, but no longer than `CLOSE_S` or `FAILED_S`."""
        deadline = time.monotonic() + (FAILED_S if failed else CLOSE_S)
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.queue.put(failed)
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
            if worker.is_alive():
                worker.warn("it did not take its remaining rows in time")


class _Worker(threading.Thread):
    """Opens one tracker and sends it rows until the end, or its first error."""

    def __init__(self, name: str, open_tracker: Callable[[str], Tracker]):
        super().__init__(name=f"log.to {name}", daemon=True)
        self.queue: queue.SimpleQueue[tuple[int, dict[str, float]] | bool] = queue.SimpleQueue()
        """Steps with their numbers; last, whether an exception ended the run."""
        self._tracker, self._open = name, open_tracker
        self.start()

    def run(self) -> None:
        failed = True
        try:
            tracker = self._open(self._tracker)
            try:
                while not isinstance(item := self.queue.get(), bool):
                    tracker.log(*item)
                failed = item
            finally:
                tracker.close(failed=failed)
        except Exception as error:  # Each package raises its own.
            self.warn(next(iter(str(error).splitlines()), type(error).__name__))

    def warn(self, why: str) -> None:
        say(f"log.to={self._tracker}: no more rows until the next start: {why}", sys.stderr)
