"""Keep a run directory, and the copies of its checkpoints, for one job: all its processes have it, or none."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from ultrascale_jax.checkpoint.saving import TimedProbe
from ultrascale_jax.config import UserError
from ultrascale_jax.launch.events import Events, say
from ultrascale_jax.launch.multihost import agree
from ultrascale_jax.launch.run_lock import NotNow, RunLock
from ultrascale_jax.storage.lock import StoreLock


@contextlib.contextmanager
def hold_run_lock(run_dir: Path, events: Events, store: str = "") -> Iterator[Callable[[], None]]:
    """Hold the lock of `run_dir`, and of the URL `store` if there is one, inside the block.

    The block gets a function that raises once a lock is lost. Raises `UserError`, on all processes, where another job
    holds one: `NotNow` if it may end soon.
    """
    with contextlib.ExitStack() as stack:
        locks: list[RunLock | StoreLock] = []
        problem, not_now = None, None
        if jax.process_index() == 0:
            try:
                locks.append(stack.enter_context(RunLock(run_dir)))
                if store:
                    locks.append(stack.enter_context(StoreLock(store, run_dir)))
            except UserError as error:
                passes = error.exit_code == NotNow.exit_code
                problem, not_now = (None, str(error)) if passes else (str(error), None)
        not_now = agree(not_now)
        if not_now is not None:
            raise NotNow(not_now)
        problem = agree(problem)
        if problem is not None:
            raise UserError(problem)
        for lock in locks:
            if lock.note is not None:
                say(lock.note)
                events.record("lock", note=lock.note)

        def ask() -> str | None:
            lost = next((lock for lock in locks if not lock.held), None)
            return None if lost is None else f"{lost.path} is another job's now"

        # Where the disk does not answer nobody can have taken it.
        probe = TimedProbe(ask, unanswered=None)

        def check() -> None:
            lost = agree(probe())
            if lost is not None:
                raise UserError(f"{lost}: this one ends")

        yield check
