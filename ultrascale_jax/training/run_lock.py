"""Keep a run directory, and the copies of its checkpoints, for one job: all its processes have it, or none."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from ultrascale_jax.checkpoint.saving import TimedProbe
from ultrascale_jax.config import UserError
from ultrascale_jax.launch.events import Events, say
from ultrascale_jax.launch.multihost import agree, broadcast_from_process0
from ultrascale_jax.launch.run_lock import NotNow, RunLock
from ultrascale_jax.storage.lock import StoreLock


@contextlib.contextmanager
def hold_run_lock(run_dir: Path, events: Events, store: str = "") -> Iterator[Callable[[], None]]:
    """Hold the lock of `run_dir`, and of the URL `store` if there is one, inside the block.

    The block gets a function that raises once that of `store` is lost. Raises `UserError`, on all processes, where
    another job holds one: `NotNow` if it may end soon.
    """
    with contextlib.ExitStack() as stack:
        refusal, locks = None, list[RunLock | StoreLock]()
        if jax.process_index() == 0:
            try:
                locks.append(stack.enter_context(RunLock(run_dir)))
                if store:
                    locks.append(stack.enter_context(StoreLock(store, run_dir)))
            except UserError as error:
                refusal = str(error), error.exit_code
        refusal = broadcast_from_process0(refusal)
        if refusal is not None:
            text, code = refusal
            raise NotNow(text) if code == NotNow.exit_code else UserError(text)
        for note in (lock.note for lock in locks if lock.note is not None):
            say(note)
            events.record("lock", note=note)

        def ask() -> str | None:
            lost = [lock for lock in locks if isinstance(lock, StoreLock) and not lock.held]
            return f"{lost[0].path} is another job's now" if lost else None

        # Where storage does not answer nobody can have taken it.
        probe = TimedProbe(ask, unanswered=None)

        def check() -> None:
            lost = agree(probe())
            if lost is not None:
                raise UserError(f"{lost}: this one ends")

        yield check
