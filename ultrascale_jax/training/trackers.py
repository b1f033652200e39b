"""Send the numbers of a run to the trackers that `log.to` names: TensorBoard, Weights & Biases, MLflow.

A tracker gets the numbers of every row of `metrics.jsonl`, in a thread of its own, so that a slow server delays no
step. One that fails is left out until the next start, with one warning. Only process 0 logs. `RUN_DIR/trackers.json`
holds the runs' ids: a run that resumes from a checkpoint continues them.

To add a tracker, write a class with the constructor and the methods of `Tracker`, and add it to `TRACKERS`.
"""

import contextlib
import dataclasses
import errno
import importlib.util
import json
import math
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import jax

from ultrascale_jax.checkpoint.run_metadata import fields
from ultrascale_jax.config import Config, UserError, require
from ultrascale_jax.hooks import Hook, Row, Run
from ultrascale_jax.launch.events import parse_object, printable, say
from ultrascale_jax.launch.multihost import agree
from ultrascale_jax.launch.run_files import folder_of, open_regular, read_regular, write_atomic

PROJECT = "ultrascale_jax"
"""Default name of the W&B project and of the MLflow experiment."""

IDS = "trackers.json"
"""File in the run directory with the id of the run at each tracker, by the tracker's name."""

NO_SERIES = ("step", "time")
"""Numbers of a row that are not series."""

QUEUED = 100_000
"""Rows that may wait for a tracker."""

CLOSE_S, FAILED_S = 45.0, 5.0
"""Seconds that trackers may take for what they have not sent at the end of a run, and of one that an exception ends."""


@dataclass(frozen=True)
class Start:
    """The run that a tracker opens for."""

    cfg: Config
    step: int
    """Steps that the run has done."""
    run_id: str | None
    """Id of the tracker's run to continue; none: begin a new one."""

    @property
    def run_dir(self) -> Path:
        return Path(self.cfg.log.run_dir)


class Tracker(Protocol):
    """One run at one tracker. The constructor takes a `Start`; all calls come from one thread and may raise."""

    @property
    def run_id(self) -> str | None:
        """Id under which a resumed run continues it; none if it needs none."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send finite numbers by name, of optimizer step `step`; steps do not decrease."""

    def close(self, *, failed: bool) -> None:
        """Send the rest and end the run; `failed`: by an exception."""


@contextlib.contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Refuse to import a module that was not imported before."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # pyrefly: ignore[unsupported-operation]
    try:
        yield
    finally:
        del sys.modules[module]


class TensorBoard:
    """Writes one file of events for TensorBoard to `RUN_DIR/tensorboard`, each event when it is made."""

    run_id: str | None = None

    def __init__(self, start: Start):
        """Open a file; a reader hides the events after `start.step` in earlier ones."""
        # For its own way to S3, tensorboardX imports boto3 where that is installed: 2.5 s of every run's start.
        with _hidden("boto3"):
            from tensorboardX.proto import event_pb2
            from tensorboardX.record_writer import masked_crc32c
            from tensorboardX.summary import scalar

        self._proto: Any = event_pb2
        self._checksum, self._scalar = masked_crc32c, scalar
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
        folder = folder_of(start.run_dir, "tensorboard")
        self._file = open(folder / name, "ab", 0, opener=open_regular)
        self._write(file_version="brain.Event:2")
        self._write(step=start.step + 1, session_log={"status": "START"})

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        parts = [self._scalar(name, value).value[0] for name, value in numbers.items()]
        self._write(step=step, summary={"value": parts})

    def close(self, *, failed: bool) -> None:
        self._file.close()

    def _write(self, **parts: Any) -> None:
        """Append an event: its length and its bytes, each with a checksum."""
        data = self._proto.Event(wall_time=time.time(), **parts).SerializeToString()
        pieces = (struct.pack("<Q", len(data)), data)
        record = b"".join(piece + struct.pack("<I", self._checksum(piece)) for piece in pieces)
        if self._file.write(record) != len(record):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class WandB:
    """Logs to Weights & Biases, whose environment variables (`WANDB_MODE`, `WANDB_PROJECT`) apply."""

    def __init__(self, start: Start):
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", start.run_dir.name),
            dir=start.run_dir,
            id=start.run_id,
            resume="allow",
            reinit="create_new",
            config=dataclasses.asdict(start.cfg),
            allow_val_change=True,
            settings=wandb.Settings(console="off"),
        )
        self.run_id = self._run.id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    """Logs to the MLflow server or store of `MLFLOW_TRACKING_URI`, in the experiment `MLFLOW_EXPERIMENT_NAME`."""

    def __init__(self, start: Start):
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client, self.run_id = MlflowClient(), start.run_id or ""
        if start.run_id is not None:
            self._client.update_run(self.run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if found is None else found.experiment_id
        self.run_id = self._client.create_run(number, run_name=start.run_dir.name).info.run_id
        params = [Param(name, str(value)) for name, value in fields(start.cfg).items()]
        for first in range(0, len(params), 100):  # as many as a server takes in one request
            self._client.log_batch(self.run_id, params=params[first : first + 100])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


class Kind(NamedTuple):
    """A tracker that `log.to` may name."""

    open: Callable[[Start], Tracker]
    module: str
    """Module that it imports."""
    extra: str
    """The extra of this package that brings it."""


TRACKERS = {
    "tensorboard": Kind(TensorBoard, "tensorboardX", "tb"),
    "wandb": Kind(WandB, "wandb", "wandb"),
    "mlflow": Kind(MLflow, "mlflow", "mlflow"),
}
"""Trackers by their names in `log.to`."""


def chosen(to: str) -> tuple[str, ...]:
    """Return the names of the trackers of `log.to`, in its order.

    Raises `UserError` if a package is missing, or MLflow has no address; see `check_trackers` too.
    """
    if to == "auto":
        return ("tensorboard",) if _is_installed("tensorboard") else ()
    names = () if to == "none" else tuple(to.split(","))
    for name in names:
        fix = f"needs a package: pip install 'ultrascale_jax[{TRACKERS[name].extra}]'"
        require(_is_installed(name), "log.to", name, fix)
    fix = "set MLFLOW_TRACKING_URI to the address of your server, such as http://localhost:5000"
    address = os.environ.get("MLFLOW_TRACKING_URI", "").strip()
    require("mlflow" not in names or address != "", "log.to", "mlflow", fix)
    return names


def check_trackers(names: Sequence[str]) -> None:
    """Raise `UserError`, on all processes, if MLflow's client, of `names`, cannot open its store.

    A server that does not answer passes: a tracker that fails ends no run.
    """
    if "mlflow" not in names:
        return
    problem = None
    if jax.process_index() == 0:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            MlflowClient()
        except MlflowException as error:
            problem = printable(error, 500)
        except Exception as error:
            say(f"log.to=mlflow: {printable(error)}", sys.stderr)
    problem = agree(problem)
    if problem is not None:
        address = os.environ.get("MLFLOW_TRACKING_URI")
        what = f"the installed client cannot open MLFLOW_TRACKING_URI={address!r} ({problem})"
        raise UserError(
            f"log.to='mlflow': {what}; give the address of a server, as http://HOST:5000"
        )


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(TRACKERS[name].module) is not None


class Trackers(Hook):
    """Sends complete rows to the trackers of a run; a context manager."""

    def __init__(self, cfg: Config, first_step: int):
        """Prepare the trackers of `cfg` behind step `first_step`. Raises as `chosen`."""
        names = chosen(cfg.log.to)
        self._names = names if jax.process_index() == 0 else ()
        self._cfg, self._step = cfg, first_step
        self._ids: dict[str, Any] = {}
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Trackers":
        path = Path(self._cfg.log.run_dir) / IDS
        if self._names and self._step and os.path.lexists(path):
            self._ids = parse_object(read_regular(path))
        for name in self._names:
            known = self._ids.get(name)
            start = Start(self._cfg, self._step, known if isinstance(known, str) else None)
            self._workers.append(_Worker(name, start, self._remember))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._close(failed=kind is not None)

    def on_metrics(self, run: Run, row: Row) -> None:
        for worker in self._workers:
            worker.put(row)

    def on_evaluation(self, run: Run, row: Row) -> None:
        self.on_metrics(run, row)

    def on_end(self, run: Run) -> None:
        with run.pause("end"):  # `watch.hang_s` is not for this section
            self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        deadline = time.monotonic() + (FAILED_S if failed else CLOSE_S)
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end(failed=failed)
        for worker in workers:
            worker.join(deadline)

    def _remember(self, name: str, run_id: str) -> None:
        """Write down the id of a tracker's run; called from the workers' threads."""
        with _REMEMBERING:
            self._ids[name] = run_id
            write_atomic(Path(self._cfg.log.run_dir) / IDS, json.dumps(self._ids).encode())


_REMEMBERING = threading.Lock()


class _Worker:
    """Thread that opens one tracker and sends it rows until the end or its first error."""

    def __init__(self, name: str, start: Start, remember: Callable[[str, str], None]):
        self._name, self._start, self._remember = name, start, remember
        self._rows: queue.Queue[tuple[int, dict[str, float]] | bool] = queue.Queue(QUEUED)
        self._failed = False
        self._thread = threading.Thread(target=self._work, name=f"log.to {name}", daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
        """Send the finite numbers of a row, later."""
        numbers = {
            name: float(value)
            for name, value in row.items()
            if isinstance(value, int | float) and math.isfinite(value) and name not in NO_SERIES
        }
        self._put((row["step"], numbers))

    def end(self, *, failed: bool) -> None:
        """Close the tracker behind the rows that wait."""
        self._put(failed)

    def join(self, deadline: float) -> None:
        """Wait for the end, until `deadline` by `time.monotonic`."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._give_up("it did not take the rest of its rows in time")

    def _put(self, item: tuple[int, dict[str, float]] | bool) -> None:
        if self._failed:
            return
        try:
            self._rows.put_nowait(item)
        except queue.Full:
            self._give_up(f"{QUEUED} rows wait for it")

    def _work(self) -> None:
        try:
            tracker = TRACKERS[self._name].open(self._start)
            if tracker.run_id is not None:
                self._remember(self._name, tracker.run_id)
            try:
                while not isinstance(item := self._rows.get(), bool):
                    tracker.log(*item)
            except Exception:
                with contextlib.suppress(Exception):
                    tracker.close(failed=True)
                raise
            tracker.close(failed=item)
        except Exception as error:  # Each package raises its own.
            lines = str(error).splitlines() or [type(error).__name__]
            self._give_up(lines[0])

    def _give_up(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            text = f"log.to={self._name}: no more rows until the next start: {why}"
            say(text, sys.stderr)
