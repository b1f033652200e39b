"""The hooks of the training loop: the place to add a metric, a check or any other work between steps.

`training/loop.py` runs the compiled step and calls hooks. All else is a hook: metrics, throughput, evaluation,
checkpoints, the profiler, health checks (`training/setup.py` lists them). To add a metric of

* the device: add it to the dict that `train_step/step.py` returns. Every entry gets a column of `metrics.jsonl`.
* the host: write a `Hook` whose `on_metrics` adds it to `row`, and call `train(cfg, mesh, hooks=[MyHook()])`.
"""

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from ultrascale_jax.config import Config
from ultrascale_jax.launch.distributed import StopRequest
from ultrascale_jax.launch.events import Events
from ultrascale_jax.launch.watchdog import Watch
from ultrascale_jax.train_step.state import TrainState

Row = dict[str, Any]
"""A row of `metrics.jsonl`: numbers by name."""

Batch = dict[str, jax.Array]
"""Input of a step: int32 [B, T] by name, on the devices."""

Metrics = dict[str, Any]
"""Report of the compiled step: arrays on the devices, by the names of columns."""

StepFn = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
"""The compiled step: state and batch to the next state and the metrics of the step."""


class Hook:
    """Base class of hooks: override the methods that you need; the others do nothing.

    Every process calls every method at the same steps, so a hook may communicate. `run.step` is the number of the
    optimizer step, from 1, and `run.state` the newest state. After a step is dispatched its state is still being
    computed, and to read it makes the devices wait for the host: do that inside `run.pause()`.
    """

    def on_start(self, run: "Run") -> None:
        """Before the first step; `run.state` is new or restored, after `run.step` steps."""

    def wrap_step(self, run: "Run", step_fn: StepFn) -> StepFn:
        """Return what is called in place of `step_fn`; called when a step is compiled, for each size of batch once."""
        return step_fn

    def before_step(self, run: "Run") -> None:
        """Before step `run.step` is dispatched; `run.state` is that of the step before."""

    def after_step(self, run: "Run") -> None:
        """After step `run.step` was dispatched; its metrics come later. `run.is_last`: no step follows."""

    def on_metrics(self, run: "Run", row: Row) -> None:
        """The metrics of step `row["step"]` were read. Add to `row` what to record.

        `run.step` may be the next step already: go by `row["step"]`.
        """

    def on_evaluation(self, run: "Run", row: Row) -> None:
        """The model was evaluated: `row` has `step`, `eval_loss` in nats, `eval_tokens`, and `eval_loss_NAME` of each
        named source of `data.eval_source`."""

    def before_save(self, run: "Run") -> None:
        """A checkpoint of step `run.step` is about to be written; everything up to it is on record. Raise to refuse."""

    def on_save(self, run: "Run") -> None:
        """The save of step `run.step` has begun; it continues in the background unless `run.is_last`."""

    def on_resume(self, run: "Run") -> None:
        """A pause is over: restart clocks."""

    def on_end(self, run: "Run") -> None:
        """The run ends in good order after `run.step` steps. `run.stopped`: by SIGTERM, before the last step."""


class Run:
    """One call of `train` as its hooks see it."""

    def __init__(
        self,
        cfg: Config,
        mesh: Mesh,
        state: TrainState,
        *,
        step: int,
        batches: Generator[tuple[int, Batch, Callable[[], Callable[[], str]]]],
        events: Events,
        watch: Watch,
        note: Callable[[str], None],
        stop: StopRequest,
        hooks: Sequence[Hook] = (),
        started: float,
    ):
        self.cfg, self.mesh, self.batches = cfg, mesh, batches
        self.state = state
        """The newest state. Keep no other reference to it: the next step may take its memory."""
        self.events, self.watch = events, watch
        self.note = note
        """Print a line, on process 0."""
        self.hooks = tuple(hooks)
        self.started = started
        """Time of the call of `train`, by `time.monotonic`."""
        self.first_step = self.step = step
        """Optimizer steps done before this process began; and the step that is under way, or was last."""
        self.stopped = False
        """Whether SIGTERM came, so that no step follows."""
        self.batch_hash: Callable[[], str] = str
        """Returns the hash of the step's batch, when the devices have it."""
        self.data_wait_s = 0.0
        """Seconds for which the step's batch was waited for."""
        self.device_wait_s = 0.0
        """Seconds so far in which this process waited for its devices."""
        self.summary: dict[str, Any] = {}
        """Result of `train`."""
        self._stop = stop
        self._unread: tuple[Row, Metrics] | None = None

    @property
    def is_last(self) -> bool:
        """Return whether no step follows `step` in this process."""
        return self.stopped or self.step >= self.cfg.train.steps

    def every(self, n: int) -> bool:
        """Return whether `step` is a multiple of `n`; with 0 never."""
        return n > 0 and self.step % n == 0

    def check_stop(self) -> bool:
        """Ask whether SIGTERM came with steps left to do; every process asks at the same points."""
        self.stopped = self._stop.reached() and self.step < self.cfg.train.steps
        return self.stopped

    def is_busy(self) -> bool:
        """Return whether the devices still compute the step that was dispatched last."""
        return self._unread is not None and not self._unread[1]["loss"].is_ready()

    @contextlib.contextmanager
    def waiting_for_devices(self) -> Iterator[None]:
        """Count the time inside as a wait for the devices."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.device_wait_s += time.monotonic() - begun

    def dispatched(self, metrics: Metrics) -> None:
        """Keep the metrics of step `step`, which is being computed, and read the metrics of the previous step."""
        self.read_metrics()
        host = {"data_wait_s": self.data_wait_s, "batch_hash": self.batch_hash}
        self._unread = ({"step": self.step, **host}, metrics)

    def read_metrics(self) -> None:
        """Wait for the step that was dispatched last, and hand its row to all hooks; nothing if that was done."""
        if self._unread is None:
            return
        (row, metrics), self._unread = self._unread, None
        with self.waiting_for_devices():
            values = jax.device_get(metrics)
        row["batch_hash"] = row["batch_hash"]()
        row |= {name: value.tolist() for name, value in values.items()}
        self.watch.beat(row["step"])
        for hook in self.hooks:
            hook.on_metrics(self, row)

    @contextlib.contextmanager
    def pause(self, section: str = "hook") -> Iterator[None]:
        """Inside, all steps are done and on record, and no clock of steps runs.

        `section` names the pause for the watchdog and the ledger: a key of `launch.watchdog.FIRST_S`.
        """
        self.read_metrics()
        with self.watch.section(section):
            yield
        for hook in self.hooks:
            hook.on_resume(self)
