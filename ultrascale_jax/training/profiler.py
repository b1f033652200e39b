"""Trace some steps of a run with JAX's profiler, and keep the program for a report of the trace (`plan/profile/`)."""

import json
from collections.abc import Callable
from pathlib import Path

import jax

from ultrascale_jax.hooks import Hook, Run, StepFn
from ultrascale_jax.launch.events import say
from ultrascale_jax.launch.run_files import write_atomic
from ultrascale_jax.plan.profile.trace import CONTEXT, FOLDER, PROGRAM

SESSIONS = "plugins/profile"
"""Where in it JAX writes a folder for each trace."""


class Profiler(Hook):
    """Traces process 0 over the steps in [first, stop), for Perfetto; a context manager.

    Whatever goes wrong with a trace ends the trace, not the run.
    """

    def __init__(self, run_dir: Path, steps: tuple[int, int] | None):
        self._run_dir, self._steps, self._active = run_dir, steps, False
        self._program, self._mesh = "", dict[str, int]()
        self._first = self._done = 0

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_) -> None:
        if self._active:
            self._try(self._stop)

    def wrap_step(self, run: Run, step_fn: StepFn) -> StepFn:
        is_profiling = self._steps is not None and jax.process_index() == 0
        if is_profiling and isinstance(step_fn, jax.stages.Compiled):
            self._program, self._mesh = step_fn.as_text() or "", dict(run.mesh.shape)
        return step_fn

    def on_start(self, run: Run) -> None:
        self._done = run.step

    def before_step(self, run: Run) -> None:
        inside = self._steps is not None and self._steps[0] <= run.step < self._steps[1]
        if inside != self._active and jax.process_index() == 0:
            with run.pause("profile"):
                jax.block_until_ready(run.state)
                self._try(self._start if inside else self._stop)

    def after_step(self, run: Run) -> None:
        self._done = run.step

    def on_end(self, run: Run) -> None:
        # The evaluation and the save that follow the last step are no part of it.
        if self._active:
            with run.pause("profile"):
                self._try(self._stop)

    def _try(self, action: Callable[[], None]) -> None:
        """Start or stop; after a fault trace no more."""
        try:
            action()
        except (
            Exception
        ) as error:  # The profiler raises whatever its plugin and the file system do.
            self._steps, self._active = None, False
            say(f"profile: no trace: {type(error).__name__}: {' '.join(str(error).split())}")

    def _start(self) -> None:
        """Begin a trace after step `_done`."""
        options = jax.profiler.ProfileOptions()
        # Calls of Python's functions slow the host, and with it the steps that are measured.
        options.python_tracer_level = 0
        jax.profiler.start_trace(
            self._run_dir / FOLDER, create_perfetto_trace=True, profiler_options=options
        )
        self._active, self._first = True, self._done + 1

    def _stop(self) -> None:
        """End the trace, and write its context."""
        self._active = False
        jax.profiler.stop_trace()
        folder = self._run_dir / FOLDER
        traces = (folder / SESSIONS).glob("*/*.xplane.pb")
        newest = max(traces, key=lambda path: path.stat().st_mtime_ns)
        device = jax.local_devices()[0]
        context = {
            "trace": newest.relative_to(folder).as_posix(),
            "first": self._first,
            "stop": self._done + 1,
            "process": jax.process_index(),
            "platform": device.platform,
            "device_kind": device.device_kind,
            "mesh": self._mesh,
        }
        write_atomic(folder / PROGRAM, self._program.encode())
        write_atomic(folder / CONTEXT, (json.dumps(context, indent=2) + "\n").encode())
