"""Trace some steps of a run with JAX's profiler."""

from pathlib import Path

import jax

from ultrascale_jax.hooks import Hook, Run
from ultrascale_jax.launch.run_files import folder_of


class Profiler(Hook):
    """Traces process 0 over the steps in [first, stop), for Perfetto; a context manager."""

    def __init__(self, folder: Path, steps: tuple[int, int] | None):
        self._folder, self._steps, self._active = folder, steps, False

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_) -> None:
        if self._active:
            jax.profiler.stop_trace()

    def before_step(self, run: Run) -> None:
        inside = self._steps is not None and self._steps[0] <= run.step < self._steps[1]
        if inside == self._active or jax.process_index() != 0:
            return
        with run.pause("profile"):
            jax.block_until_ready(run.state)
            if self._active:
                jax.profiler.stop_trace()
            else:
                # Where the profiler writes, though it would follow links there.
                folder = folder_of(self._folder.parent, f"{self._folder.name}/plugins/profile")
                jax.profiler.start_trace(folder.parents[1], create_perfetto_trace=True)
            self._active = inside
