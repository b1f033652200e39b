"""A profiler trace of some steps of a run."""

from pathlib import Path

import jax

from ultrascale_jax.launch.run_files import folder_of
from ultrascale_jax.train_step.state import TrainState


class Tracer:
    """Profiler trace of the steps in [first, stop), which Perfetto opens."""

    def __init__(self, folder: Path, steps: tuple[int, int] | None):
        self._folder, self._steps, self._active = folder, steps, False

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(self, *_) -> None:
        if self._active:
            jax.profiler.stop_trace()

    def turns(self, step: int) -> bool:
        """Whether the trace begins or ends before `step`."""
        inside = self._steps is not None and self._steps[0] <= step < self._steps[1]
        return inside != self._active and jax.process_index() == 0

    def turn(self, state: TrainState) -> None:
        """Begin or end the trace, when the steps before are done."""
        jax.block_until_ready(state)
        if self._active:
            jax.profiler.stop_trace()
        else:
            # Where the profiler writes, though it would follow links there.
            folder = folder_of(self._folder.parent, f"{self._folder.name}/plugins/profile")
            jax.profiler.start_trace(folder.parents[1], create_perfetto_trace=True)
        self._active = not self._active
