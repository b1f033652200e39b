"""Keep a run directory for one job: all its processes have it, or none."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from ultrascale_jax.checkpoint.saving import TimedProbe
from ultrascale_jax.config import UserError
from ultrascale_jax.launch.events import Events, say
from ultrascale_jax.launch.multihost import agree
from ultrascale_jax.launch.run_lock import NotNow, RunLock


@contextlib.contextmanager
def hold_run_lock(run_dir: Path, events: Events) -> Iterator[Callable[[], None]]:
    """Hold the lock of `run_dir` inside the block, which gets a function that raises once it is lost.

    Raises `UserError`, on all processes, where another job holds it: `NotNow` if it may end soon.
    """
    with contextlib.ExitStack() as stack:
        lock, problem, not_now = None, None, None
        if jax.process_index() == 0:
            try:
                lock = stack.enter_context(RunLock(run_dir))
            except NotNow as error:
                not_now = str(error)
            except UserError as error:
                problem = str(error)
        not_now = agree(not_now)
        if not_now is not None:
            raise NotNow(not_now)
        problem = agree(problem)
        if problem is not None:
            raise UserError(problem)
        if lock is not None and lock.note is not None:
            say(lock.note)
            events.record("lock_taken_over", note=lock.note)

        def ask() -> str | None:
            return None if lock is None or lock.held else f"{lock.path} is another job's now"

        # Where the disk does not answer nobody can have taken it.
        probe = TimedProbe(ask, unanswered=None)

        def check() -> None:
            lost = agree(probe())
            if lost is not None:
                raise UserError(f"{lost}: this one did not beat for a while, and ends")

        yield check
