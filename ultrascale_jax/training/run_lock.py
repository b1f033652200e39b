"""Keep a run directory for one job: all its processes have it, or none."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from ultrascale_jax.config import UserError
from ultrascale_jax.launch.events import Events, say
from ultrascale_jax.launch.multihost import broadcast_from_process0
from ultrascale_jax.launch.run_lock import NotNow, run_lock


@contextlib.contextmanager
def hold_run_lock(run_dir: Path, events: Events) -> Iterator[None]:
    """Hold the lock of `run_dir` inside the block.

    Raises `UserError`, on all processes, where another job holds it: `NotNow` if it may end soon.
    """
    with contextlib.ExitStack() as stack:
        refusal = note = None
        if jax.process_index() == 0:
            try:
                note = stack.enter_context(run_lock(run_dir))
            except UserError as error:
                refusal = str(error), error.exit_code
        refusal = broadcast_from_process0(refusal)
        if refusal is not None:
            text, code = refusal
            raise NotNow(text) if code == NotNow.exit_code else UserError(text)
        if note is not None:
            say(note)
            events.record("lock", note=note)
        yield
